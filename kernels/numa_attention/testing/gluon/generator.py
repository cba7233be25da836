"""Triton's own code generator, run eagerly: a statement has its effect when it is visited.

Only control flow and calls are replaced. All else, the meaning of every expression included, is Triton's.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from triton.compiler.code_generator import CodeGenerator
from triton.language import core
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from numa_attention import gluon_compat
from numa_attention.testing.gluon.builder import EmulatingBuilder
from numa_attention.testing.gluon.faults import NotModelled
from numa_attention.testing.gluon.semantic import EmulatingSemantic
from numa_attention.testing.gluon.values import Value


class _Return(Exception):
    def __init__(self, value) -> None:
        super().__init__()
        self.value = value


_trees: dict[Callable, list[ast.stmt]] = {}


def _body(function: JITFunction) -> list[ast.stmt]:
    # a JITFunction's own hash would look through all that it calls
    if function.fn not in _trees:
        _trees[function.fn] = function.parse().body[0].body
    return _trees[function.fn]


@functools.cache
def _compilable(fn: Callable) -> JITFunction:
    return JITFunction(fn)


def as_jit_function(value):
    """A function of Triton's library is an interpreted one where TRITON_INTERPRET is set; here, a compilable one."""
    return _compilable(value.fn) if isinstance(value, InterpretedFunction) else value


class _ByIdentity:
    """A mapping from functions that does not hash the function asked for."""

    def __init__(self, entries: dict) -> None:
        self._entries = list(entries.items())

    def get(self, function):
        return next((value for key, value in self._entries if key is function), None)


class EagerGenerator(CodeGenerator):
    """One call of one function."""

    # a JITFunction's hash is that of all it calls, and fails where the library is interpreted
    statically_implemented_functions = _ByIdentity(CodeGenerator.statically_implemented_functions)

    def __init__(
        self, function: JITFunction, builder: EmulatingBuilder, context, caller_context=None
    ) -> None:
        # super().__init__ would open a compiler module; what the visitors use is set here
        self.context = context
        self.is_gluon = True
        self.builder = builder
        self.semantic = EmulatingSemantic(builder)
        self.jit_fn = function
        self.caller_context = caller_context
        self.function_name = function.__name__
        self.file_name = os.path.basename(function.fn.__code__.co_filename)
        self.in_library = function.fn.__module__.startswith("triton.")
        self.begin_line = gluon_compat.first_line(function) - 1
        self.begin_col = 0
        if function.fn not in builder.scopes:
            scope = function.get_capture_scope()
            builder.scopes[function.fn] = {name: self._global(value) for name, value in scope.items()}
        self.gscope = builder.scopes[function.fn]
        self.lscope = {}
        self.local_defs = {}
        self.pending_annotations = {}
        self.name_loc_as_prefix = None
        self.visiting_arg_default_value = False
        self.cur_node = None
        self.module = None
        self.fn = None
        self.scf_stack = []
        self.dereference_name = self._define_name_lookup()

    def _global(self, value):
        module_map = self.builder.module_map
        if isinstance(value, ModuleType):
            return module_map.get(value.__name__, value)
        module = getattr(value, "__module__", "")
        if module in module_map:
            return getattr(module_map[module], value.__name__)
        return as_jit_function(value)

    def place(self) -> str:
        """The line that it is at."""
        line = self.begin_line + getattr(self.cur_node, "lineno", 1)
        return f"{self.file_name}:{line} in {self.function_name}"

    def run(self, arguments: dict):
        for name, value in arguments.items():
            self.set_value(name, value)
        frames = self.builder.scheduler.current.frames
        frames.append(self)
        try:
            self.visit_compound_statement(_body(self.jit_fn))
        except _Return as returned:
            frames.pop()
            return returned.value
        # an error leaves its frames, for the message
        frames.pop()
        return core.constexpr(None)

    def visit(self, node):
        if node is None:
            return None
        if isinstance(node, (ast.stmt, ast.Call)):
            self.cur_node = node
        return getattr(self, f"visit_{type(node).__name__}", self.generic_visit)(node)

    def _maybe_set_loc_to_name(self, value, name) -> None:
        pass

    # ---- calls ----

    def call_Function(self, node, fn, args, kws):
        result = super().call_Function(node, as_jit_function(fn), args, kws)
        self.cur_node = node
        return result

    def call_JitFunction(self, fn, args, kwargs, caller_context=None):
        fn = as_jit_function(fn)
        bound = fn.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {name: gluon_compat.normalize_value(bound.arguments[name]) for name in fn.arg_names}
        callee = EagerGenerator(fn, self.builder, self.context, caller_context or self.caller_context)
        return callee.run(arguments)

    def visit_Return(self, node):
        if self.scf_stack:
            raise self._unsupported(node, "return inside a `for` or `while`")
        value = self.visit(node.value)
        raise _Return(core.constexpr(None) if value is None else value)

    # ---- control flow ----

    def _truth(self, condition, node) -> tuple[bool, bool]:
        """(which way to go, whether only the run decides that)."""
        if isinstance(condition, core.condition):
            condition = condition.condition
        if isinstance(condition, core.tensor):
            data: torch.Tensor = condition.handle.data
            if data.numel() != 1:
                if not condition.type.is_block():
                    raise NotModelled("a branch in the combine function of a reduction: use gl.where")
                raise self._unsupported(node, "the truth of a tensor with more than one value is ambiguous")
            return bool(data), True
        condition = core._unwrap_if_constexpr(condition)
        if type(condition) not in (bool, int, type(None)):
            raise self._unsupported(node, f"a condition of type {type(condition).__name__}")
        return bool(condition), False

    def visit_If(self, node):
        taken, at_run_time = self._truth(self.visit(node.test), node)
        before = dict(self.lscope)
        self.visit_compound_statement(node.body if taken else node.orelse)
        if not at_run_time:
            return
        for name, old in before.items():
            self._require_same_type(name, old, "the branch of a run-time `if`", node)
        # compiled, a name that only one branch binds does not exist behind it
        elsewhere = _bound_names(node.orelse if taken else node.body)
        for name in [name for name in self.lscope if name not in before and name not in elsewhere]:
            del self.lscope[name]

    def _require_same_type(self, name: str, old, where: str, node) -> None:
        new = self.lscope[name]
        if new is not old and isinstance(old, core.tensor) and getattr(new, "type", None) != old.type:
            raise self._unsupported(
                node, f"{name} is {old.type} and becomes {getattr(new, 'type', new)} in {where}"
            )

    def visit_IfExp(self, node):
        taken, at_run_time = self._truth(self.visit(node.test), node)
        value = self.visit(node.body if taken else node.orelse)
        return self.semantic.to_tensor(value) if at_run_time else value

    def _loop(self, node, rounds: Iterable, induction: str | None = None) -> None:
        living = set(self.lscope)
        self.scf_stack.append(node)
        for value in rounds:
            before = dict(self.lscope)
            if induction is not None:
                self.set_value(induction, value)
            self.visit_compound_statement(node.body)
            for name, old in before.items():
                if name != induction and self.lscope[name] is not old:
                    self._verify_loop_carried_variable(name, self.lscope[name], old)
            # a name that the body binds first is gone in the next round, and after the loop
            self.lscope = {name: value for name, value in self.lscope.items() if name in living}
        self.scf_stack.pop()

    def visit_While(self, node):
        def rounds():
            while self._truth(self.visit(node.test), node)[0]:
                yield None

        self._loop(node, rounds())

    def visit_For(self, node):
        kind = self.visit(node.iter.func)
        arguments = [self.visit(argument) for argument in node.iter.args]
        options = dict(self.visit(keyword) for keyword in node.iter.keywords)
        name = node.target.id
        if kind is core.static_range:
            unrolled = kind(*arguments, **options)
            for number in range(unrolled.start.value, unrolled.end.value, unrolled.step.value):
                self.lscope[name] = core.constexpr(number)
                self.visit_compound_statement(node.body)
            return
        if kind is core.range:
            bounds = kind(*arguments, **options)
            arguments = [bounds.start, bounds.end, bounds.step]
        elif kind is not range:
            raise self._unsupported(node, "only range, gl.range and gl.static_range can be iterated")
        defaults = {1: [0, *arguments, 1], 2: [*arguments, 1]}
        bounds = [self.semantic.to_tensor(bound) for bound in defaults.get(len(arguments), arguments)]
        if not all(bound.dtype.is_int() for bound in bounds):
            raise TypeError("the bounds and the step of a loop must be integers")
        start, stop, step = (int(bound.handle.item()) for bound in bounds)
        if step == 0:
            raise self._unsupported(node, "a loop with step 0")
        promote = self.semantic.integer_promote_impl
        number_type = promote(promote(bounds[0].dtype, bounds[1].dtype), bounds[2].dtype)
        emulated = number_type.to_ir(self.builder)
        numbers = (
            core.tensor(Value(torch.tensor(number, dtype=emulated.dtype), emulated), number_type)
            for number in range(start, stop, step)
        )
        self.lscope.setdefault(name, None)
        self._loop(node, numbers, name)
        if self.lscope.get(name) is None:
            self.lscope.pop(name, None)


def _bound_names(statements: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
