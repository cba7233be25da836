"""Run as a process: which attention backend vLLM's ROCm platform selects on a pretended AMD device.

    python rocm_probe.py gfx942 MODEL '{"kv_cache_dtype": "fp8"}'

Everything but the device and its management library is vLLM's own. The last line is JSON: the backend and, where it is
ours, the graphs it supports and the float8 type of the cache; or the error.
"""

from __future__ import annotations

import argparse
import json
import sys
import types


def pretend_amdsmi(arch: str) -> None:
    """AMD's management library, as much of it as vLLM asks, with one device of this architecture."""
    smi = types.ModuleType("amdsmi")
    smi.AmdSmiException = type("AmdSmiException", (Exception,), {})
    smi.AmdSmiMemoryType = types.SimpleNamespace(VRAM=0)
    smi.amdsmi_init = smi.amdsmi_shut_down = lambda *arguments: None
    smi.amdsmi_get_processor_handles = lambda: ["device 0"]
    smi.amdsmi_get_gpu_asic_info = lambda handle: {
        "target_graphics_version": arch,
        "device_id": "0x74a1",
        "market_name": arch,
    }
    smi.amdsmi_get_gpu_device_uuid = lambda handle: "0"
    smi.amdsmi_get_gpu_memory_total = lambda handle, kind: 192 << 30
    smi.amdsmi_topo_get_link_type = lambda *handles: {"hops": 1, "type": 2}
    smi.amdsmi_topo_get_numa_node_number = lambda handle: 0
    sys.modules["amdsmi"] = smi


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch")
    parser.add_argument("model")
    parser.add_argument("options", help="of EngineArgs, as JSON")
    arguments = parser.parse_args()
    pretend_amdsmi(arguments.arch)

    import vllm.platforms

    # this is a CPU build: its platform would answer first, and its library wants instructions not every CPU has
    sys.modules["vllm._C"] = None
    vllm.platforms.builtin_platform_plugins = {"rocm": vllm.platforms.builtin_platform_plugins["rocm"]}
    from vllm.platforms import current_platform

    assert current_platform.is_rocm(), current_platform
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.selector import get_attn_backend

    # torch finds no GPU here; vLLM asks it for the number of them
    torch.cuda.device_count = lambda: 1
    answer = {"platform": type(current_platform).__name__}
    try:
        args = EngineArgs(
            model=arguments.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=512,
            **json.loads(arguments.options),
        )
        config = args.create_engine_config()
        with set_current_vllm_config(config):
            cache = config.cache_config
            backend = get_attn_backend(
                config.model_config.get_head_size(), config.model_config.dtype, cache.cache_dtype
            )
            ours = backend.__module__.startswith("vllm_numa_backend")
            if ours:
                impl = backend.get_impl_cls()(4, 64, 0.125, 2, kv_cache_dtype=cache.cache_dtype)
    except ValueError as error:
        answer["error"] = str(error)
    else:
        answer["backend"] = f"{backend.__module__}.{backend.__qualname__}"
        if ours:
            answer["graphs"] = backend.get_builder_cls().get_cudagraph_support(config, None).name
            answer["fp8"] = str(impl.fp8_dtype)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
