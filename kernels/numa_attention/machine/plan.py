"""Tensor-parallel and context-parallel sizes for a model on some GPUs: what fits, what is fastest, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from ..limits import fault_of_head_dim
from . import ModelError
from .machines import Machine
from .placement import MERGED_TENSORS, Attention, Cost, costs
from .two_levels import TwoLevels, explain, ways_to_share

WEIGHT_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "mxfp4": 0.53,
    "int4": 0.5,
}
KV_BYTES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1}
ACTIVATIONS_BYTES = (
    2 * 1e9
)  # what an engine keeps for activations, graphs and the communication library on each GPU
COLLECTIVE_LATENCY = 10e-6  # seconds of one small collective between GPUs
COLLECTIVES_PER_LAYER = 2  # all-reduces of tensor parallelism
MOST_TOKENS = (1 << 31) - 1  # of a request: vLLM counts them in 32 bits


@dataclass(frozen=True)
class ModelShape:
    """A decoder model as planning sees it. `latent`: elements of a token's compressed KV (MLA), 0 for MHA and GQA.

    layers: all of them. full_layers: those whose KV grows with the context. window: tokens kept by the others.
    """

    name: str
    layers: int
    full_layers: int
    window: int
    q_heads: int
    kv_heads: int
    head_dim: int
    latent: int
    weights_bytes: float
    element_bytes: float
    trained_context: int

    @property
    def kv_elements(self) -> int:
        """Elements that one layer caches for one token."""
        return self.latent or 2 * self.kv_heads * self.head_dim


def read_config(path: str | Path) -> ModelShape:
    """The shape in a Hugging Face config.json, or in the folder of one.

    Raises ModelError, one sentence, where there is none or it lacks what an attention layer has.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"there is no {path}: give a Hugging Face config.json or its folder.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is no readable config.json: {error}.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no config.json: it holds no object.")
    text = config.get("text_config") or config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    quantised = (config.get("quantization_config") or {}).get("quant_method")
    return shape_of(text, str(path), dtype or "bfloat16", quantised)


def number(config: dict, key: str, where: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where} has no usable {key} (it is {value!r}): a decoder's config.json needs it.")
    return value


def shape_of(config: dict, where: str, dtype: str, quantised: str | None) -> ModelShape:
    """The shape in the text part of a config."""
    layers = number(config, "num_hidden_layers", where)
    q_heads = number(config, "num_attention_heads", where)
    hidden = number(config, "hidden_size", where)
    latent = 0
    if config.get("kv_lora_rank"):
        latent = number(config, "kv_lora_rank", where) + number(config, "qk_rope_head_dim", where)
        kv_heads, head_dim = 1, latent
    else:
        kv_heads = number(config, "num_key_value_heads", where)
        if config.get("head_dim") is None and hidden % q_heads:
            raise ModelError(
                f"{where} has no head_dim, and {q_heads} heads do not divide hidden_size {hidden}."
            )
        head_dim = number(config, "head_dim", where) if config.get("head_dim") else hidden // q_heads
        if q_heads % kv_heads:
            raise ModelError(
                f"{where}: num_attention_heads {q_heads} is no multiple of num_key_value_heads {kv_heads}."
            )
    kinds = config.get("layer_types") or []
    growing = ("full_attention", "attention")
    full = sum(kind in growing for kind in kinds) if kinds else layers
    window = config.get("sliding_window") or 0
    if not kinds and window and config.get("use_sliding_window", True):
        full = 0
    if dtype not in WEIGHT_BYTES:
        raise ModelError(f"{where} has dtype {dtype!r}: known are {', '.join(WEIGHT_BYTES)}.")
    weight_bytes = WEIGHT_BYTES.get(quantised or dtype, WEIGHT_BYTES[dtype])
    return ModelShape(
        name=str(config.get("model_type", "model")),
        layers=layers,
        full_layers=full,
        window=int(window),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        latent=latent,
        weights_bytes=weight_bytes * parameters(config, layers, hidden, q_heads, kv_heads, head_dim, where),
        element_bytes=min(2, WEIGHT_BYTES[dtype]) if dtype not in ("float32", "float") else 4,
        trained_context=int(config.get("max_position_embeddings") or 0),
    )


def parameters(
    config: dict, layers: int, hidden: int, q_heads: int, kv_heads: int, head_dim: int, where: str
) -> float:
    """Parameters of a decoder, from its sizes: embeddings, attention, gated feed-forward layers or experts."""
    vocabulary = number(config, "vocab_size", where)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    if config.get("kv_lora_rank"):
        no_rope, rope = number(config, "qk_nope_head_dim", where), number(config, "qk_rope_head_dim", where)
        values, rank = number(config, "v_head_dim", where), number(config, "kv_lora_rank", where)
        q_rank = config.get("q_lora_rank")
        query = (
            q_rank * (hidden + q_heads * (no_rope + rope)) if q_rank else hidden * q_heads * (no_rope + rope)
        )
        attention = (
            query + hidden * (rank + rope) + rank * q_heads * (no_rope + values) + q_heads * values * hidden
        )
    else:
        attention = hidden * head_dim * 2 * (q_heads + kv_heads)
    experts = (
        config.get("n_routed_experts") or config.get("num_local_experts") or config.get("num_experts") or 0
    )
    dense_layers = config.get("first_k_dense_replace", 0) if experts else layers
    width = config.get("intermediate_size") or 4 * hidden
    feed_forward = dense_layers * 3 * hidden * width
    if experts:
        expert_width = config.get("moe_intermediate_size") or width
        shared = config.get("n_shared_experts") or 0
        feed_forward += (layers - dense_layers) * 3 * hidden * expert_width * (experts + shared)
    return float(embeddings + layers * attention + feed_forward)


@dataclass(frozen=True)
class Option:
    """One way to split. KV heads go `head_parts` ways, the context `context_parallel` ways, the weights over all GPUs.

    kv_bytes: of all requests, on one GPU. room_bytes: what weights and activations leave for it, below 0 where they do
    not fit. longest_context: tokens a request that fit. seconds: one decode step. possible: whether vLLM takes it.
    obstacle: why NUMA_SWIZZLE does not serve it, "" where it does. whole_windows: whether layers with a window keep
    the whole context too.
    """

    tensor_parallel: int
    context_parallel: int
    head_parts: int
    kv_copies: int
    weights_bytes: float
    kv_bytes: float
    room_bytes: float
    fits: bool
    longest_context: int
    seconds: float
    possible: bool
    obstacle: str
    whole_windows: bool = False


@dataclass(frozen=True)
class Plan:
    """The answer: `best` of `options`, of those that NUMA_SWIZZLE serves where there are any, `reasons` in sentences.

    placements: the six, for one request over GPUs (outer) and their NUMA domains (inner). placements_fit: whether all
    requests fit so. placements_seconds: reading and moving of one decode step. placement: the fastest that fits, or
    None. ways_to_share: ranks that share each sequence and splits inside each, for a decode step of one layer; none for
    MLA. sharing: why the fastest of these is the fastest.
    """

    model: ModelShape
    machine: str
    gpus: int
    context: int
    requests: int
    fits: bool
    best: Option
    options: list[Option]
    reasons: list[str]
    flags: str
    placements: list[Cost]
    placements_fit: list[bool]
    placements_seconds: list[float]
    placement: int | None
    ways_to_share: list[TwoLevels]
    sharing: str


def tokens(text: str) -> int:
    """A number of tokens: 131072, 128k, 1M, 10M (k = 2**10, M = 2**20).

    Raises ModelError otherwise.
    """
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    word = text.strip().lower()
    factor = units.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    try:
        value = int(float(digits) * factor)
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise ModelError(f"{text!r} is no number of tokens: write 131072, 128k or 1M.")
    if value > MOST_TOKENS:
        raise ModelError(f"{text} tokens are too many: vLLM counts those of a request up to {MOST_TOKENS:,}.")
    return value


def layer_tokens(model: ModelShape, context: int, whole_windows: bool) -> float:
    """Tokens cached, summed over layers: windows stop growing, unless `whole_windows`."""
    others = model.layers - model.full_layers
    kept = context if whole_windows else min(context, model.window)
    return model.full_layers * context + others * (kept if model.window else 0)


def option(
    model: ModelShape,
    machine: Machine,
    gpus: int,
    context_parallel: int,
    context: int,
    requests: int,
    kv_element_bytes: float,
    utilisation: float,
) -> Option:
    """Memory and time of one split."""
    parts = gpus // context_parallel
    heads = ceil(model.kv_heads / parts)
    copies = max(1, parts * heads // model.kv_heads)
    elements = model.latent or 2 * heads * model.head_dim
    token_bytes = elements * kv_element_bytes * requests / context_parallel
    weights = model.weights_bytes / gpus
    room = machine.memory_bytes.value * utilisation - weights - ACTIVATIONS_BYTES
    # vLLM shards the caches of windows only where it keeps them whole
    whole_windows = context_parallel > 1 and model.window > 0 and model.full_layers < model.layers
    kv_bytes = token_bytes * layer_tokens(model, context, whole_windows)
    growing = token_bytes * (model.layers if whole_windows else model.full_layers)
    fixed = kv_bytes - growing * context
    if room < fixed:
        longest = 0
    elif growing:
        longest = int((room - fixed) / growing)
    else:
        longest = context
    collectives = model.layers * COLLECTIVES_PER_LAYER if gpus > 1 else 0
    state = 0.0
    if context_parallel > 1:
        # the partial outputs are exchanged once per layer, with m and l in the same message
        collectives += model.layers
        per_gpu_heads = model.q_heads / parts
        state = model.layers * requests * per_gpu_heads * (model.head_dim + MERGED_TENSORS - 1) * 4
    reading = (weights + kv_bytes) / machine.memory_bandwidth.value
    link = state * (context_parallel - 1) / machine.link_bandwidth.value
    return Option(
        gpus,
        context_parallel,
        parts,
        copies,
        weights,
        kv_bytes,
        room,
        kv_bytes <= room,
        longest,
        reading + link + collectives * COLLECTIVE_LATENCY,
        not (refusal := vllm_refusal(model, gpus, context_parallel)),
        f"vLLM refuses it: {refusal}"
        if refusal
        else fault_of_model(model) or fault_of_split(model, gpus, context_parallel),
        whole_windows,
    )


def vllm_refusal(model: ModelShape, gpus: int, context_parallel: int) -> str:
    """Why vLLM does not shard heads and context so, "" where it does (vllm/config/model.py and its model classes).

    The context is sharded over GPUs that would hold copies of the same KV head, each of which takes as many of its
    query heads as the others.
    """
    if model.latent:
        return ""
    if model.kv_heads % gpus and gpus % model.kv_heads:
        return f"{model.kv_heads} KV heads and {gpus} GPUs do not divide one another"
    if context_parallel == 1:
        return ""
    if gpus <= model.kv_heads:
        return f"context parallelism takes more GPUs than the {model.kv_heads} KV heads"
    copies = gpus // model.kv_heads
    if context_parallel > copies:
        return f"{gpus} GPUs for {model.kv_heads} KV heads take at most context parallelism {copies}"
    if model.window and model.full_layers == 0:
        return "context parallelism shards no cache of sliding windows alone"
    group = model.q_heads // model.kv_heads
    if group % context_parallel:
        return f"{group} query heads of a KV head do not divide by {context_parallel}"
    return ""


def fault_of_model(model: ModelShape) -> str:
    """Why NUMA_SWIZZLE does not serve the model, however it is split; "" where it does."""
    if model.latent:
        return "has multi-head latent attention (MLA), which NUMA_SWIZZLE does not serve"
    fault = fault_of_head_dim(model.head_dim)
    return f"head_dim {model.head_dim} {fault}, which NUMA_SWIZZLE does not serve" if fault else ""


def fault_of_split(model: ModelShape, gpus: int, context_parallel: int) -> str:
    """Why NUMA_SWIZZLE does not serve a split that vLLM takes; "" where it does."""
    copies = max(1, gpus // model.kv_heads)
    if copies % context_parallel:
        return f"puts GPUs with different KV heads into one group, of {copies} copies each, which NUMA_SWIZZLE refuses"
    return ""


def make_plan(
    model: ModelShape,
    machine: Machine,
    gpus: int,
    context: int,
    *,
    requests: int = 1,
    kv_dtype: str = "auto",
    utilisation: float = 0.9,
) -> Plan:
    """The split for `requests` requests of `context` tokens each on `gpus` of `machine`.

    Raises ModelError where a number is out of range or vLLM does not divide the heads over the GPUs.
    """
    for name, value in (("gpus", gpus), ("context", context), ("requests", requests)):
        if value < 1:
            raise ModelError(f"{name} is {value}: it must be at least 1.")
    if not 0 < utilisation <= 1:
        raise ModelError(f"memory utilisation is {utilisation}: it must be above 0 and at most 1.")
    if kv_dtype not in KV_BYTES:
        raise ModelError(f"unknown KV dtype {kv_dtype!r}: choose one of {', '.join(KV_BYTES)}.")
    if model.q_heads % gpus:
        raise ModelError(f"{model.q_heads} query heads do not divide over {gpus} GPUs: choose a divisor.")
    element = KV_BYTES[kv_dtype] or model.element_bytes
    sizes = [cp for cp in range(1, gpus + 1) if gpus % cp == 0]
    options = [option(model, machine, gpus, cp, context, requests, element, utilisation) for cp in sizes]
    possible = [each for each in options if each.possible]
    if not possible:
        refusal = vllm_refusal(model, gpus, 1)
        raise ModelError(f"{refusal}, so vLLM does not split them: choose another number of GPUs.")
    served = [each for each in possible if not each.obstacle]
    best = min(
        served or possible, key=lambda each: (not each.fits, each.seconds if each.fits else each.kv_bytes)
    )
    attention = Attention(
        1 if model.latent else model.kv_heads,
        model.q_heads if model.latent else model.q_heads // model.kv_heads,
        model.head_dim,
        max(1, model.full_layers),
        max(1, int(element)),
    )
    if model.latent:
        # the latent serves as key and value: one copy, not two
        attention = replace(attention, head_dim=model.head_dim // 2)
    placed = costs(attention, context, gpus, machine.domains)
    unit_room = (
        machine.memory_bytes.value * utilisation - ACTIVATIONS_BYTES - model.weights_bytes / gpus
    ) / machine.domains
    fitting = [requests * each.unit_kv_bytes <= unit_room for each in placed]
    times = [requests * placement_seconds(each, machine, gpus) for each in placed]
    ways = []
    if not model.latent:
        ways = ways_to_share(
            machine, gpus, q_heads=model.q_heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
            element_bytes=element, context=context, requests=requests,
        )  # fmt: skip
    winners = [(time, each.case) for time, each, fits in zip(times, placed, fitting, strict=True) if fits]
    return Plan(
        model,
        machine.name,
        gpus,
        context,
        requests,
        best.fits,
        best,
        options,
        reasons(model, machine, best, possible, requests, context, utilisation),
        flags(best),
        placed,
        fitting,
        times,
        min(winners)[1] if winners else None,
        ways,
        explain(ways, gpus) if ways else "",
    )


def placement_seconds(cost: Cost, machine: Machine, gpus: int) -> float:
    """What a domain reads at its share of the memory's bandwidth, and what the GPUs then move over their links."""
    reading = cost.unit_kv_bytes / (machine.memory_bandwidth.value / machine.domains)
    return reading + (cost.score_bytes + cost.state_bytes) / (gpus * machine.link_bandwidth.value)


def flags(best: Option) -> str:
    """vLLM's flags for the split."""
    context = f" --decode-context-parallel-size {best.context_parallel}" if best.context_parallel > 1 else ""
    windows = " --disable-hybrid-kv-cache-manager" if best.whole_windows else ""
    return f"--tensor-parallel-size {best.tensor_parallel}{context}{windows}"


def reasons(
    model: ModelShape,
    machine: Machine,
    best: Option,
    possible: list[Option],
    requests: int,
    context: int,
    utilisation: float,
) -> list[str]:
    """Why, in sentences."""
    said = []
    if fault := fault_of_model(model):
        said.append(
            f"This model {fault}: leave out VLLM_ATTENTION_BACKEND and --attention-backend, and vLLM takes another."
        )
    said += [weights_sentence(machine, best, utilisation), context_sentence(model, best, possible)]
    if best.fits:
        said.append(
            f"{requests} request{'s' * (requests > 1)} of {context:,} tokens fit; up to {best.longest_context:,} would."
        )
    elif best.room_bytes <= 0:
        said.append("It does not fit: the weights alone are too large; use more GPUs or quantised weights.")
    else:
        said.append(
            f"It does not fit: the longest context is {best.longest_context:,} tokens; use more GPUs, or an FP8 cache."
        )
    if model.trained_context and context > model.trained_context:
        said.append(f"The model was made for {model.trained_context:,} tokens (max_position_embeddings).")
    return said


def weights_sentence(machine: Machine, best: Option, utilisation: float) -> str:
    """What the weights leave of a GPU's memory, or by how much they exceed it."""
    gb = 1e9
    left = (
        f"which leaves {best.room_bytes / gb:.1f} GB for KV"
        if best.room_bytes > 0
        else f"{-best.room_bytes / gb:.1f} GB too many"
    )
    return (
        f"Weights take {best.weights_bytes / gb:.1f} GB of each GPU's {machine.memory_bytes.value / gb:.0f} GB, of "
        f"which the engine may use {utilisation:.0%} and needs {ACTIVATIONS_BYTES / gb:.0f} GB for other things, "
        f"{left}."
    )


def context_sentence(model: ModelShape, best: Option, possible: list[Option]) -> str:
    """Why the context is sharded, or is not."""
    gb = 1e9
    plain = possible[0]
    sharded = min(possible, key=lambda each: (not each.fits, each.seconds if each.fits else each.kv_bytes))
    if sharded.context_parallel > 1:
        saves = (
            f"{sharded.tensor_parallel} GPUs for {model.kv_heads} KV head{'s' * (model.kv_heads > 1)} hold "
            f"{plain.kv_copies} copies of each; context parallelism {sharded.context_parallel} would hold "
            f"{sharded.kv_copies}, {sharded.kv_bytes / gb:.1f} GB a GPU instead of {plain.kv_bytes / gb:.1f} GB"
        )
        return f"{saves}." if best == sharded else f"{saves}: that {sharded.obstacle}."
    if len(possible) == 1:
        return (
            f"{model.kv_heads} KV heads fill {best.tensor_parallel} GPU{'s' * (best.tensor_parallel > 1)}: there are "
            "no copies of KV that sharding the context could save."
        )
    return "Sharding the context would save memory that is not needed, and adds a merge per layer."
