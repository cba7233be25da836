"""Which backend runs, for every way to ask for one, up to the class that vLLM selects."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
import vllm.envs as envs
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend

import vllm_numa_backend
from plugin.harness import engine_args, write_model
from vllm_numa_backend import compat, selection, settings

CUSTOM = AttentionBackendEnum.CUSTOM


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No variable set, none known from an earlier test, no selection cached."""
    monkeypatch.delenv(selection.VARIABLE, raising=False)
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    envs.environment_variables.pop(selection.VARIABLE, None)
    vllm_numa_backend.register()
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    _cached_get_attn_backend.cache_clear()
    yield
    _cached_get_attn_backend.cache_clear()


class Lines(logging.Handler):
    """The messages that our logger gave."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def log():
    handler = Lines()
    logger = logging.getLogger("vllm.numa_swizzle")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def selected(model, **choices) -> str:
    config = engine_args(model, **choices).create_engine_config()
    with set_current_vllm_config(config):
        return get_attn_backend(32, torch.float32, "auto").get_name()


@pytest.mark.parametrize("choice", ["NUMA_SWIZZLE", "numa_swizzle", CUSTOM], ids=str)
def test_option(model, choice):
    assert selected(model, attention_backend=choice) == "NUMA_SWIZZLE"


def test_command_line(model):
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(model), "--skip-tokenizer-init", "--attention-backend", "numa_swizzle"]
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
    assert args.create_engine_config().attention_config.backend is CUSTOM


@pytest.mark.parametrize("value", ["NUMA_SWIZZLE", "numa_swizzle", " Numa_Swizzle"])
def test_variable(model, monkeypatch, value):
    monkeypatch.setenv(selection.VARIABLE, value)
    assert selected(model) == "NUMA_SWIZZLE"
    assert selected(model, fail_on_environ_validation=True) == "NUMA_SWIZZLE"


def test_explicit_choice_wins_over_the_variable(model, monkeypatch, log):
    monkeypatch.setenv(selection.VARIABLE, "NUMA_SWIZZLE")
    assert selected(model, attention_backend="CPU_ATTN") == "CPU_ATTN"
    assert "gives way" in log.text
    assert selected(model, attention_config={"backend": "CPU_ATTN"}) == "CPU_ATTN"
    assert selected(model, attention_backend="auto") == "CPU_ATTN"


def test_nobody_asks(model):
    assert selected(model) == "CPU_ATTN"


def test_the_variable_leaves_the_arguments_alone(model, monkeypatch):
    monkeypatch.setenv(selection.VARIABLE, "NUMA_SWIZZLE")
    args = engine_args(model)
    for _ in range(2):
        assert args.create_engine_config().attention_config.backend is CUSTOM
        assert args.attention_backend is None
    monkeypatch.delenv(selection.VARIABLE)
    assert args.create_engine_config().attention_config.backend is None


def test_variable_naming_another_backend(model, monkeypatch, log):
    """vLLM goes on ignoring it, or refusing it, as it would without us; we say so."""
    monkeypatch.setenv(selection.VARIABLE, "FLASH_ATTN")
    assert selected(model) == "CPU_ATTN"
    (line,) = log.lines
    assert "ignores VLLM_ATTENTION_BACKEND=FLASH_ATTN" in line and "--attention-backend FLASH_ATTN" in line
    with pytest.raises(ValueError, match="Unknown vLLM environment variable"):
        engine_args(model, fail_on_environ_validation=True).create_engine_config()


def test_one_backend_per_kind_of_layer(model, monkeypatch):
    from vllm.config import AttentionConfig

    if "backend_per_kind" not in AttentionConfig.__dataclass_fields__:
        pytest.skip("this vLLM has one backend for all layers")
    chosen = {"backend_per_kind": {"full_attention": "NUMA_SWIZZLE"}}
    assert selected(model, attention_config=chosen) == "NUMA_SWIZZLE"
    monkeypatch.setenv("NUMA_SWIZZLE_MAPPING", "diagonal")
    settings.current.cache_clear()
    with pytest.raises(settings.SettingsError, match="diagonal"):
        engine_args(model, attention_config=chosen).create_engine_config()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NUMA_SWIZZLE_KERNELS", "cuda", "it can be auto, triton, torch or interpret"),
        ("NUMA_SWIZZLE_KERNELS", "triton", "needs a GPU"),
        ("NUMA_SWIZZLE_SPLITS", "8", "is not a setting"),
    ],
)
def test_wrong_settings_stop_the_engine_only_where_the_backend_is_asked_for(
    model, monkeypatch, variable, value, message
):
    monkeypatch.setenv(variable, value)
    settings.current.cache_clear()
    with pytest.raises(settings.SettingsError, match=message):
        engine_args(model, attention_backend="NUMA_SWIZZLE").create_engine_config()
    assert selected(model, fail_on_environ_validation=True) == "CPU_ATTN"


def test_slot_of_another_plugin(model, monkeypatch, log):
    registry._ATTN_OVERRIDES[CUSTOM] = "other_plugin.Backend"
    monkeypatch.delitem(AttentionBackendEnum._member_map_, "NUMA_SWIZZLE")
    vllm_numa_backend.register()
    assert "held by other_plugin.Backend" in log.text
    assert registry._ATTN_OVERRIDES[CUSTOM] == "other_plugin.Backend"
    assert "NUMA_SWIZZLE" not in AttentionBackendEnum.__members__
    assert selected(model) == "CPU_ATTN"
    with pytest.raises(ValueError, match="held by other_plugin.Backend"):
        engine_args(model, attention_backend="NUMA_SWIZZLE").create_engine_config()
    monkeypatch.setenv(selection.VARIABLE, "NUMA_SWIZZLE")
    with pytest.raises(ValueError, match="held by other_plugin.Backend"):
        engine_args(model).create_engine_config()


def test_slot_taken_after_us(model):
    registry._ATTN_OVERRIDES[CUSTOM] = "other_plugin.Backend"
    with pytest.raises(ValueError, match="held by other_plugin.Backend"):
        engine_args(model, attention_backend="NUMA_SWIZZLE").create_engine_config()


def test_registering_again_changes_nothing():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    def state():
        return (
            EngineArgs.create_engine_config,
            type(current_platform).get_attn_backend_cls.__func__,
            dict(AttentionBackendEnum._member_map_),
            dict(registry._ATTN_OVERRIDES),
            dict(envs.environment_variables),
        )

    before = state()
    vllm_numa_backend.register()
    assert state() == before


def test_untested_release_is_named_once(monkeypatch, log):
    monkeypatch.setattr(compat, "release", lambda: "1.7.0.dev3+gabc")
    selection._warn_of_untested_release.cache_clear()
    for _ in range(2):
        vllm_numa_backend.register()
    (line,) = log.lines
    assert "vLLM 1.7.0.dev3+gabc is not among" in line
    assert all(version in line for version in compat.TESTED_RELEASES)
    selection._warn_of_untested_release.cache_clear()


@pytest.mark.parametrize("version", [*compat.TESTED_RELEASES, "0.32.1", "0.33.0+cu129"])
def test_tested_releases_are_not_warned_of(version):
    assert compat.untested_release(version) is None


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0rc1", "dev", "1.0"])
def test_other_releases_are_warned_of(version):
    assert version in compat.untested_release(version)


def test_a_release_that_does_not_fit(monkeypatch, log):
    """A hook that does not fit is a warning, but an error for whoever asks for the backend."""

    def broken(engine_args_class):
        raise AttributeError("no such field")

    monkeypatch.setattr(selection, "_hook_engine_args", broken)
    vllm_numa_backend.register()
    assert "NUMA_SWIZZLE is not available" in log.text and "no such field" in log.text
    monkeypatch.setenv(selection.VARIABLE, "NUMA_SWIZZLE")
    with pytest.raises(RuntimeError, match="VLLM_ATTENTION_BACKEND asks for NUMA_SWIZZLE"):
        vllm_numa_backend.register()


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_registration_imports_no_kernel():
    """vLLM may have imported Triton itself: what counts is what registration adds."""
    code = """
import sys, vllm.engine.arg_utils
from vllm.platforms import current_platform
current_platform.is_cpu()
before = set(sys.modules)
import vllm_numa_backend
vllm_numa_backend.register()
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print("ADDED", sorted(added & {"triton", "numa_attention", "torch", "vllm_numa_backend"}))
"""
    assert "ADDED ['vllm_numa_backend']" in run(code)


def test_members_travel_to_processes_without_the_plugin():
    """vLLM unpickles its configuration in a new process before that process loads plugins."""
    import pickle

    data = pickle.dumps(AttentionBackendEnum["NUMA_SWIZZLE"])
    code = f"""
import pickle
member = pickle.loads({data!r})
import vllm_numa_backend
vllm_numa_backend.register()
print("CLASS", member.get_class().get_name())
"""
    assert "CLASS NUMA_SWIZZLE" in run(code)
