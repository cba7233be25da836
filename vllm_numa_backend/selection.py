"""How NUMA_SWIZZLE gets chosen: its name in vLLM's registry, VLLM_ATTENTION_BACKEND, and vLLM's CPU platform.

vLLM lets plugins have one registry slot, CUSTOM. NUMA_SWIZZLE becomes a second name of that slot: members
travel to other processes by value, and every process knows the value of CUSTOM before it loads plugins.
VLLM_ATTENTION_BACKEND, which vLLM itself no longer reads, is the default of --attention-backend again, for
our name only.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger

from vllm_numa_backend import NAME, settings

VARIABLE = "VLLM_ATTENTION_BACKEND"
BACKEND_PATH = "vllm_numa_backend.backend.NumaSwizzleBackend"
_HOOKED = "_numa_swizzle_hook"

# below vLLM's own logger, whose handlers and level then apply
logger = init_logger("vllm.numa_swizzle")


def install() -> None:
    """Put every hook in place, once per process however often it is called.

    Raises RuntimeError where VLLM_ATTENTION_BACKEND asks for NUMA_SWIZZLE and a hook does not fit this vLLM.
    Where nobody asks, that is a warning: a broken plugin must not stop a server that uses another backend.
    """
    try:
        _install()
    except Exception as error:
        if asked_by_environment():
            raise RuntimeError(
                f"{VARIABLE} asks for {NAME}, which cannot be installed into this vLLM: {error!r}"
            ) from error
        logger.warning("%s is not available, it cannot be installed into this vLLM: %r", NAME, error)


def asked_by_environment() -> bool:
    """Whether VLLM_ATTENTION_BACKEND names our backend, in any case."""
    return os.environ.get(VARIABLE, "").strip().upper() == NAME


def slot_owner() -> str | None:
    """The class path registered in vLLM's CUSTOM slot, None where it is free."""
    slot = _slot()
    return slot.get_path() if slot.is_overridden() else None


def require_usable() -> None:
    """Raise one clear error where NUMA_SWIZZLE is asked for and cannot run here.

    Raises SettingsError (a NUMA_SWIZZLE_* variable is wrong) or ValueError (another plugin holds the slot).
    """
    from vllm.platforms import current_platform

    if slot_owner() != BACKEND_PATH:
        raise ValueError(_slot_is_taken())
    reason = settings.why_unusable(settings.current(), current_platform.device_type)
    if reason is not None:
        raise settings.SettingsError(reason)


def _install() -> None:
    from vllm.platforms import current_platform

    _warn_of_untested_release()
    _claim_name()
    _admit_variable()
    if current_platform.is_cpu():
        _hook_cpu_platform(type(current_platform))
    # a child process gets its engine's configuration ready made, and need not import what creates one
    if multiprocessing.parent_process() is None or "vllm.engine.arg_utils" in sys.modules:
        from vllm.engine.arg_utils import EngineArgs

        _hook_engine_args(EngineArgs)


@functools.cache
def _warn_of_untested_release() -> None:
    from vllm_numa_backend import compat

    warning = compat.untested_release(compat.release())
    if warning is not None:
        logger.warning(warning)


def _slot() -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CUSTOM


def _claim_name() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if slot_owner() is None:
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    if slot_owner() != BACKEND_PATH:
        logger.warning(_slot_is_taken())
        return
    AttentionBackendEnum._member_map_.setdefault(NAME, AttentionBackendEnum.CUSTOM)


def _slot_is_taken() -> str:
    return (
        f"{NAME} is not available: vLLM's only slot for out-of-tree attention backends, CUSTOM, is held by "
        f"{slot_owner()}. Uninstall that plugin or leave it out of VLLM_PLUGINS."
    )


def _admit_variable() -> None:
    """Let vLLM's check of VLLM_* names (--fail-on-environ-validation) pass the variable where it is ours."""
    import vllm.envs as envs

    if asked_by_environment():
        envs.environment_variables.setdefault(VARIABLE, functools.partial(os.environ.get, VARIABLE))


def _hook_engine_args(engine_args_class: type) -> None:
    original = engine_args_class.create_engine_config
    if hasattr(original, _HOOKED):
        return
    if "attention_backend" not in engine_args_class.__dataclass_fields__:
        raise AttributeError("vllm.engine.arg_utils.EngineArgs has no field attention_backend")

    @functools.wraps(original)
    def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
        with _default_from_environment(self):
            return original(self, *args, **kwargs)

    setattr(create_engine_config, _HOOKED, True)
    engine_args_class.create_engine_config = create_engine_config


@contextlib.contextmanager
def _default_from_environment(engine_args: Any) -> Iterator[None]:
    """VLLM_ATTENTION_BACKEND=NUMA_SWIZZLE stands in for an --attention-backend that was not given."""
    config = engine_args.attention_config
    explicit = engine_args.attention_backend
    if explicit is None:
        explicit = config.backend
    per_kind = getattr(config, "backend_per_kind", {}).values()

    by_default = explicit is None and asked_by_environment()
    if by_default or any(map(_is_ours, (explicit, *per_kind))):
        require_usable()
    elif asked_by_environment():
        logger.info("%s=%s gives way to the attention backend given explicitly: %s", VARIABLE, NAME, explicit)
    _explain_other_value()

    if not by_default:
        yield
        return
    engine_args.attention_backend = NAME
    try:
        yield
    finally:
        engine_args.attention_backend = None


def _is_ours(choice: Any) -> bool:
    if isinstance(choice, str):
        return choice.strip().upper() == NAME or (
            choice.strip().upper() == "CUSTOM" and slot_owner() == BACKEND_PATH
        )
    return choice is _slot() and slot_owner() == BACKEND_PATH


def _explain_other_value() -> None:
    """Say that vLLM ignores VLLM_ATTENTION_BACKEND where it names a backend that is not ours and it does."""
    import vllm.envs as envs

    other = os.environ.get(VARIABLE, "").strip()
    if other and not asked_by_environment() and VARIABLE not in envs.environment_variables:
        logger.warning(
            "This vLLM ignores %s=%s. To choose that backend use --attention-backend %s.",
            VARIABLE,
            other,
            other,
        )


def _hook_cpu_platform(platform_class: type) -> None:
    """vLLM's CPU platform takes CPU_ATTN whatever is asked for: make it heed ours, as GPU platforms do."""
    original = platform_class.get_attn_backend_cls
    if hasattr(original, _HOOKED):
        return

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args: Any, **kwargs: Any) -> str:
        if not _is_ours(selected_backend):
            return original(selected_backend, attn_selector_config, *args, **kwargs)
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(f"{NAME} cannot run this model as configured: {'; '.join(reasons)}.")
        logger.info("Using %s backend.", NAME)
        return BACKEND_PATH

    functools.update_wrapper(get_attn_backend_cls, original.__func__)
    setattr(get_attn_backend_cls, _HOOKED, True)
    platform_class.get_attn_backend_cls = classmethod(get_attn_backend_cls)
