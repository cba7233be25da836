"""Launching a compiled kernel without what Triton does anew at each launch, most of the CPU time of a layer's call.

Triton's launches look for descriptors, encode a tensor map for each of them, and ask the driver where each tensor lies.
Here descriptors are encoded once for each address, and addresses are handed over instead of tensors: callers must have
made sure that these are the device's. On AMD, where nothing is encoded, `Direct` makes the call that Triton's
`CompiledKernel` makes; with releases of Triton that are not known here, nothing is launched directly. Importing this
file does not import Triton.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

KNOWN_RELEASES = ("3.6", "3.7", "3.8", "3.9")
# tensor maps that are kept: layouts of a kernel's descriptors, those of queries differ by step, and addresses of each
KNOWN_LAYOUTS, KNOWN_MAPS = 256, 4096


class Direct:
    """A compiled kernel that is launched with addresses, numbers and tensor maps."""

    def __init__(self, compiled: CompiledKernel) -> None:
        import triton

        self._compiled = compiled
        self.places = {name: place for place, name in enumerate(compiled.src.fn.arg_names)}
        types = [str(compiled.src.signature[name]) for name in self.places]
        self._pointers = [place for place, type_ in enumerate(types) if type_.startswith("*")]
        driver = triton.runtime.driver.active
        self._device, self._stream = driver.get_current_device, driver.get_current_stream
        self._runtime = triton.knobs.runtime
        # by place, what makes of a descriptor the tensor map that the launcher in C takes before its sizes and strides
        self._encoders: dict[int, Callable[[object], object]] = {}
        self._dimensions: dict[int, int] = {}  # of each descriptor, known once it has been flattened
        self._maps: dict[tuple, dict[int, object]] = {}
        self._nested = False
        self._send, self._middle = (
            compiled.run,
            (compiled.function, compiled.packed_metadata, None, None, None),
        )
        if _only_sends(compiled):
            self._skip_python()

    def _skip_python(self) -> None:
        """Find the launcher in C and what Triton hands over to it before the arguments."""
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        compiled, recorded = self._compiled, []
        spy = copy.copy(compiled.run)
        spy.launch = lambda *arguments: recorded.append(arguments)
        marks = tuple(object() for _ in self.places)
        spy(1, 1, 1, 0, *self._middle, *marks)
        (arguments,) = recorded
        self._nested = arguments[-1] == marks  # since Triton 3.7
        self._middle = arguments[4 : -1 if self._nested else -len(marks)]
        self._send = compiled.run.launch
        signature = compiled.src.signature
        described = [
            place for name, place in self.places.items() if str(signature[name]).startswith("tensordesc")
        ]
        if not described:
            return
        self._send = inspect.getclosurevars(self._send).nonlocals["launcher"]
        before = () if self._nested else (None,) * (len(arguments) - len(marks))
        of_each = compiled.metadata.tensordesc_meta

        def encoder(place: int, metadata) -> Callable[[object], object]:
            types = {0: signature[compiled.src.fn.arg_names[place]]}
            expand = wrap_handle_tensordesc(lambda *arguments: arguments, types, [metadata])
            if self._nested:
                return lambda descriptor: expand((descriptor,))[-1][0]
            return lambda descriptor: expand(*before, descriptor)[len(before)]

        self._encoders = {
            place: encoder(place, metadata) for place, metadata in zip(described, of_each, strict=True)
        }

    @property
    def has_descriptors(self) -> bool:
        return bool(self._encoders)

    @cached_property
    def begins(self) -> dict[str, int]:
        """Where each argument begins among flat ones."""
        begins, next_one = {}, 0
        for name, place in self.places.items():
            begins[name] = next_one
            # a descriptor of n dimensions is followed by its sizes and strides
            next_one += 1 + 2 * self._dimensions.get(place, 0)
        return begins

    def flatten(self, arguments: Sequence) -> list:
        """What `__call__` takes instead of a kernel's arguments."""
        flat = list(arguments)
        for place in self._pointers:
            if isinstance(flat[place], torch.Tensor):
                flat[place] = flat[place].data_ptr()
        for place in reversed(self._encoders):
            made = flat[place]
            self._dimensions[place] = len(made.shape)
            flat[place : place + 1] = (self.encode(place, made), *made.shape, *made.strides)
        return flat

    def maps(self, place: int, descriptor: object) -> dict[int, object]:
        """By address, what has been encoded for descriptors like this one: those of a cache serve every step."""
        layout = place, *descriptor.shape, *descriptor.strides, *descriptor.block_shape
        found = self._maps.get(layout)
        if found is None:
            if len(self._maps) >= KNOWN_LAYOUTS:
                self._maps.clear()
            found = self._maps[layout] = {}
        return found

    def encode(self, place: int, descriptor: object, known: dict[int, object] | None = None) -> object:
        """What stands first for a descriptor among flat arguments: its tensor map. known: its `maps`, if at hand."""
        known = self.maps(place, descriptor) if known is None else known
        address = descriptor.base.data_ptr()
        found = known.get(address)
        if found is None:
            if len(known) >= KNOWN_MAPS:
                known.clear()
            encoder = self._encoders.get(place)
            found = known[address] = descriptor if encoder is None else encoder(descriptor)
        return found

    def __call__(self, grid: tuple[int, int, int], arguments: Sequence) -> None:
        """Launch on the current stream. arguments: addresses or tensors, numbers, and the constants in their order."""
        middle, runtime = self._middle, self._runtime
        stream = self._stream(self._device())
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", True) or getattr(leave, "calls", True):  # a profiler listens
            metadata = self._compiled.launch_metadata(grid, stream)
            at = _hooks_of(middle, self._compiled.packed_metadata)
            middle = (*middle[:at], metadata, enter, leave, *middle[at + 3 :])
        if self._nested:
            self._send(*grid, stream, *middle, arguments)
        else:
            self._send(*grid, stream, *middle, *arguments)


def _hooks_of(middle: tuple, packed_metadata: object) -> int:
    """Where launch metadata and the two hooks stand: in every release behind the kernel's own metadata."""
    return next(at for at, x in enumerate(middle) if x is packed_metadata) + 1


def _only_sends(compiled: CompiledKernel) -> bool:
    """Whether Triton's launcher for NVIDIA does nothing for this kernel that its part in C needs."""
    launcher, metadata = compiled.run, compiled.metadata
    described = any(str(type_).startswith("tensordesc") for type_ in compiled.src.signature.values())
    return (
        type(launcher).__module__ == "triton.backends.nvidia.driver"
        and not (launcher.global_scratch_size or launcher.profile_scratch_size)
        and not getattr(launcher, "gsan_enabled", False)
        # without metadata a descriptor is no tensor map
        and bool(getattr(metadata, "tensordesc_meta", None) or not described)
    )


def direct(compiled: object) -> Direct | None:
    """The direct launch of what a launch by Triton has returned, None where that is no compiled kernel."""
    import triton
    from triton.compiler import CompiledKernel

    known = triton.__version__.startswith(tuple(f"{release}." for release in KNOWN_RELEASES))
    return Direct(compiled) if known and isinstance(compiled, CompiledKernel) else None


class Launched(NamedTuple):
    """A launch that a layer's call has made, and all it takes to repeat it; see `Repeat`.

    name: of the variant that ran. direct: None where it cannot be repeated, as under an interpreter. maps: by name of
    the argument that is a descriptor, the name of the tensor that it describes and what makes one of such a tensor.
    """

    name: str
    direct: Direct | None
    grid: tuple[int, int, int]
    arguments: tuple
    maps: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {}  # noqa: RUF012


class Repeat:
    """A launch that is made again and again: only some addresses and numbers differ, and perhaps the grid."""

    def __init__(self, launched: Launched, names: tuple[str, ...]) -> None:
        """names: of what `__call__` is given, in its order; those that the kernel does not take are left out."""
        direct = self._direct = launched.direct
        self.name, self._grid = launched.name, launched.grid
        self._arguments = direct.flatten(launched.arguments)
        begins = direct.begins
        self._given = [(begins[name], index) for index, name in enumerate(names) if name in begins]
        self._maps = []
        for name, (tensor, make) in launched.maps.items():
            place = direct.places[name]
            known = direct.maps(place, launched.arguments[place])
            self._maps.append((begins[name], names.index(tensor), known, place, make))

    def constant(self, name: str) -> object:
        """A compile-time constant of the kernel."""
        return self._arguments[self._direct.begins[name]]

    def __call__(
        self,
        values: tuple,
        tensors: tuple[torch.Tensor, ...] = (),
        grid: tuple[int, int, int] | None = None,
    ) -> None:
        """values: addresses and numbers in the order of `names`. tensors: of the first ones, where there are maps.
        grid: another one than that of the first launch.
        """
        arguments = self._arguments.copy()
        for begin, index in self._given:
            arguments[begin] = values[index]
        for begin, index, known, place, make in self._maps:
            found = known.get(values[index])
            arguments[begin] = (
                self._direct.encode(place, make(tensors[index]), known) if found is None else found
            )
        self._direct(grid or self._grid, arguments)
