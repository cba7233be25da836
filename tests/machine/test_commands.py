"""numa-swizzle simulate, plan, variant: JSON for programs, tables for people, one sentence for mistakes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_numa_backend import cli

MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 1024,
    "vocab_size": 1000,
}
L2 = "simulate l2 --machine h200 --mapping head-first --batch 1 --q-heads 8 --kv-heads 8 --length 4096 "
L2 += "--head-dim 128 --block-m 128 --block-n 64"
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "machine-model-measured.json"
PREDICTIONS = Path(__file__).resolve().parents[2] / "docs" / "machine-model-predictions.json"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line here; returns (exit code, what it printed, what it complained)."""

    def call(line):
        monkeypatch.setattr(sys, "argv", ["numa-swizzle", *line.split()])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ending:
            cli.main()
        shown = capsys.readouterr()
        return ending.value.code, shown.out, shown.err

    return call


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path / "config.json"


@pytest.mark.parametrize("options", ["", " --causal", " --domains 8", " --closed-form"])
def test_l2_json(run, options):
    pytest.importorskip("numba", reason="the simulation needs the extra `model`")
    code, out, _ = run(L2 + options + " --json")
    answer = json.loads(out)
    assert code == 0
    assert 0 < answer["hit_rate"] < 1
    assert 0 < answer["hbm_bytes"] <= answer["requested_bytes"]
    assert answer["seconds"] > 0 and answer["streams_per_domain"] >= 1
    assert answer["grid"]["causal"] == ("--causal" in options)
    assert answer["grid"]["domains"] == (8 if "--domains" in options else 1)


def test_l2_table(run):
    pytest.importorskip("numba", reason="the simulation needs the extra `model`")
    code, out, _ = run(L2)
    assert code == 0 and "for Q (all misses)" in out
    assert [line for line in out.splitlines() if line.startswith("domain 1") and "for K and V" in line]
    assert run(L2.replace("4096", "4k"))[1] == out


def test_seed_one(run):
    code, out, _ = run("simulate seed-1 --json")
    answer = json.loads(out)
    assert code == 0 and len(answer["rows"]) == 24 and len(answer["sweep"]) > 200
    for row in answer["rows"]:
        assert abs(row["difference"]) <= 0.03 or row["why"], row
    rows = {
        (row["figure"], row["mapping"], row["length"]): row for row in answer["rows"] if row["figure"] == "13"
    }
    assert rows["13", "head-first", 131072]["difference"] > 0.3  # not bent to fit
    assert rows["13", "swizzled-head-first", 131072]["difference"] == pytest.approx(0, abs=0.01)


def test_seed_one_as_a_figure(run, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the extra `model`")
    code, _, _ = run(f"simulate seed-1 --json --plot {tmp_path / 'hits.png'}")
    assert code == 0 and (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")


def test_seed_tables(run):
    for name in ("seed-1", "seed-2"):
        code, out, _ = run(f"simulate {name}")
        assert code == 0 and len(out.splitlines()) > 40
        assert "…" not in out


def test_seed_two_json(run):
    code, out, _ = run("simulate seed-2 --json")
    rows = json.loads(out)["rows"]
    assert code == 0 and all(row["label"] in ("derived", "calibrated", "contradicts") for row in rows)
    copies = [row["ours"] for row in rows if row["name"].startswith("IPCQ copies")]
    assert copies == [0, 168, 280, 280, 189]


def test_plan(run, model):
    code, out, _ = run(f"plan --model {model} --context 1M --machine mi300x --gpus 8 --json")
    answer = json.loads(out)
    assert code == 0 and answer["fits"] and len(answer["placements"]) == 6 and answer["reasons"]
    assert [way["ranks"] for way in answer["ways_to_share"]] == [1, 2, 4, 8] and answer["sharing"]
    code, out, _ = run(f"plan --model {model} --context 1M --machine mi300x --gpus 8")
    assert code == 0 and "vllm serve" in out and "ranks x splits" in out
    code, out, _ = run(f"plan --model {model} --context 1M --machine mi300x --gpus 1 --requests 1000")
    assert code == 1 and "over 1 GPU (outer)" in out


def test_plan_marks_what_is_served(run, model):
    code, out, _ = run(f"plan --model {model} --context 1M --machine mi300x --gpus 4")
    assert code == 0
    (sharded,) = [line for line in out.splitlines() if line.startswith("4 x 2")]
    assert "serves it" in sharded
    model.write_text(json.dumps(MODEL | {"head_dim": 320}))
    code, out, _ = run(f"plan --model {model} --context 1M --machine mi300x --gpus 4")
    assert code == 1 and "head_dim 320 is above 256" in out and "not with NUMA_SWIZZLE" in out


VARIANT = "variant --q-heads 64 --kv-heads 8 --head-dim 128 --batch 1 --context 131072 --device gfx942"


def test_variant(run):
    code, out, _ = run(VARIANT + " --phase decode")
    assert code == 0 and "8 ACCs" in out and "76 splits" in out and "one domain" in out
    code, out, _ = run(VARIANT + " --phase prefill")
    assert code == 0 and "swizzled-head-first" in out and "does not matter" in out
    assert "measured" in run(VARIANT.replace("gfx942", "h200") + " --phase prefill")[1]


def test_variant_over_gpus(run):
    line = "variant --q-heads 8 --kv-heads 1 --head-dim 128 --context 1M --device h200 --gpus 2"
    code, out, _ = run(line)
    assert code == 0 and "2 ranks of 2 share each sequence" in out and "2 x 264 *" in out
    assert "8 query heads over 524,288 tokens" in out and "1 ACC (requests x KV heads)" in out
    code, out, _ = run(line + " --json")
    answer = json.loads(out)
    assert [way["ranks"] for way in answer["ways_to_share"]] == [1, 2]
    assert answer["split_tokens"] == 2048
    code, _, complaint = run(line + " --phase prefill")
    assert code != 0 and "--gpus is about decode" in complaint


@pytest.mark.parametrize(
    ("mapping", "phase", "shown"),
    [
        ("head-first", "prefill", "mapping head-first over"),
        ("block-first", "decode", "mapping head-first over"),
        ("swizzled-block-first", "decode", "mapping swizzled-head-first over"),
    ],
)
def test_variant_heeds_the_mapping(run, monkeypatch, mapping, phase, shown):
    monkeypatch.setenv("NUMA_SWIZZLE_MAPPING", mapping)
    line = f"{VARIANT.replace('131072', '128k')} --phase {phase}"
    code, out, _ = run(line)
    assert code == 0 and shown in out
    answer = json.loads(run(f"{line} --json")[1])
    swizzled = mapping.startswith("swizzled")
    assert answer["mapping"] == answer["variant"]["mapping"] and answer["domains"] == (8 if swizzled else 1)
    assert any(f"asks for {mapping}" in reason for reason in answer["reasons"]) == (not swizzled)
    assert answer["domains_per_acc"] == (8 if phase == "decode" and not swizzled else 1)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NUMA_SWIZZLE_MAPPING", "sideways", "NUMA_SWIZZLE_MAPPING=sideways is unknown"),
        ("NUMA_SWIZZLE_KERNELS", "torch", "attends on the CPU only, not on MI300X"),
        ("NUMA_SWIZZLE_SPEED", "high", "NUMA_SWIZZLE_SPEED is not a setting"),
    ],
)
def test_variant_checks_the_settings(run, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    code, out, err = run(VARIANT)
    assert code == 2 and not out and words in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        VARIANT,
        VARIANT.replace("--context 131072", "--context 3000"),
        VARIANT.replace("--batch 1", "--batch 5").replace("131072", "1000"),
        VARIANT.replace("--kv-heads 8", "--kv-heads 1").replace("gfx942", "mi450"),
        VARIANT.replace("64 --kv-heads 8", "12 --kv-heads 12").replace("gfx942", "h200"),
    ],
)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_what_variant_names_is_what_a_planner_launches(run, line, phase):
    import torch

    from numa_attention.schedule import Planner, StepBatch
    from numa_attention.shapes import LayerShape
    from numa_attention.topology import pretend

    words = dict(zip(line.split()[1::2], line.split()[2::2], strict=True))
    q_heads, kv_heads, batch, context = (
        int(words[name]) for name in ("--q-heads", "--kv-heads", "--batch", "--context")
    )
    if phase == "prefill":
        context = min(context, 4096)
        line = line.replace(words["--context"], str(context))
    code, out, _ = run(f"{line} --phase {phase} --json")
    answer = json.loads(out)
    assert code == 0
    shape = LayerShape(q_heads, kv_heads, 128, 128, torch.bfloat16, torch.bfloat16, 16)
    topology = pretend(words["--device"])
    tokens = 1 if phase == "decode" else context
    limits = dict(max_requests=8, max_tokens=8 * tokens)
    # tensors without memory, as on a GPU that is not there: the variants of the kernels that a GPU runs
    launched = Planner(shape, "meta", kernels="triton", topology=topology, **limits)
    chosen = launched.decode_variant if phase == "decode" else launched.prefill_variant
    assert answer["variant"] == dataclasses.asdict(chosen)
    assert answer["mapping"] == chosen.mapping and answer["domains"] == chosen.domains_used
    # the list itself, with the same tiles, from the host's form of it
    planner = Planner(shape, "cpu", kernels="torch", topology=topology, **limits)
    planner.decode_variant, planner.prefill_variant = launched.decode_variant, launched.prefill_variant
    planner.row_blocks = launched.row_blocks
    planner.decode_buffers = planner._make_decode_buffers()
    starts = torch.arange(batch + 1, dtype=torch.int32) * tokens
    decodes = batch if phase == "decode" else 0
    table = torch.zeros(batch, -(-context // 16), dtype=torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    planner._tiles = torch.zeros(batch * kv_heads * (context * q_heads // kv_heads), 4, dtype=torch.int32)
    step = StepBatch(starts, starts, lengths, table, decodes, decodes, tokens, context)
    schedule = planner.plan(step)
    if phase == "prefill":
        assert answer["workgroups"] == len(schedule.prefill.tiles)
        return
    ranges, items = schedule.decode.ranges, schedule.decode.items
    assert answer["workgroups"] == len(ranges)
    assert answer["busy"] == int((ranges[:, 1] > 0).sum())
    owners, longest, most = {}, 0, 0
    for row, (first, count) in enumerate(ranges[:, :2].tolist()):
        domain = row // (len(ranges) // answer["domains"])
        for request, head, _, begin, end, _, splits, _ in items[first : first + count, :8].tolist():
            owners.setdefault((request, head), set()).add(domain)
            longest, most = max(longest, end - begin), max(most, splits)
    assert answer["splits"] == most
    assert answer["split_tokens"] == longest * chosen.block_n
    assert answer["domains_per_acc"] == max(map(len, owners.values()))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_variant_of_a_cpu_needs_no_model(run, phase, monkeypatch):
    monkeypatch.setenv("NUMA_SWIZZLE_KERNELS", "torch")
    line = f"{VARIANT.replace('gfx942', 'cpu')} --phase {phase}"
    code, shown, _ = run(line)
    assert code == 0 and shown.startswith(f"variant torch-{phase}, tile ") and "one NUMA domain" in shown
    code, shown, _ = run(f"{line} --json")
    assert code == 0 and json.loads(shown)["variant"]["name"] == f"torch-{phase}"


def test_variant_names_the_kernels_of_gfx1250(run):
    line = "variant --q-heads 64 --kv-heads 2 --phase decode --batch 64 --context 4096 --device gfx1250"
    code, out, _ = run(line)
    assert code == 0 and "variant cdna5-decode (four-stage)" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (L2.replace("h200", "h300"), "unknown machine 'h300'"),
        (L2.replace("h200", "cpu"), "has no CPU"),
        (VARIANT.replace("131072", "9999999999M"), "too many"),
        (VARIANT.replace("gfx942", "cpu") + " --gpus 8", "has no CPU"),
        (L2.replace("--kv-heads 8", "--kv-heads 3"), "multiple of kv_heads"),
        (L2.replace("head-first", "tail-first"), "unknown mapping 'tail-first'"),
        ("plan --model nowhere --context 1M --machine mi300x", "config.json"),
        ("plan --model nowhere --context 1M --machine none", "nowhere"),
        ("variant --q-heads 12 --kv-heads 8 --context 4096 --device gfx942", "12"),
        ("variant --q-heads 64 --kv-heads 8 --context 4096 --device gfx999", "gfx999"),
        ("variant --q-heads 64 --kv-heads 8 --context 4096 --device gfx942 --phase sleep", "sleep"),
        ("simulate compare nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes_end_in_one_sentence(run, line, words):
    code, out, err = run(line)
    assert code == 2 and not out
    assert words in err and len(err.strip().splitlines()) == 1, err


def test_a_config_without_kv_heads(run, model):
    model.write_text(json.dumps({key: value for key, value in MODEL.items() if key != "num_key_value_heads"}))
    code, _, err = run(f"plan --model {model} --context 1M --machine mi300x")
    assert code == 2 and "num_key_value_heads" in err and len(err.strip().splitlines()) == 1


def test_comparing_a_measurement(run, tmp_path):
    predicted = json.loads(PREDICTIONS.read_text())["predictions"]
    assert len(predicted) == 12
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"points": predicted}))
    code, out, _ = run(f"simulate compare {measured} --json")
    assert json.loads(out)["simulation"]["hit_rms"] == 0
    code, _, err = run(f"simulate compare {measured} --rate hit_rate_all")
    assert code == 2 and "hit_rate_all" in err
    far = [row | {"hit_rate": row["hit_rate"] / 2} for row in predicted]
    measured.write_text(json.dumps({"points": far}))
    code, out, _ = run(f"simulate compare {measured}")
    assert code == 1 and "a mark is missed" in out


def test_the_committed_measurement(run):
    code, out, _ = run(f"simulate compare {MEASURED} --json")
    answer = json.loads(out)
    assert code == 1 and answer["points"] == 12
    text = (MEASURED.parent / "machine-model.md").read_text()
    for method in ("simulation", "closed_form"):
        errors = answer[method]
        for name in ("hit_rms", "hit_worst", "hit_worst_at_the_ends", "bytes_worst"):
            assert f" {errors[name] * 100:.1f} |" in text, (method, name)
    hits, share = answer["missed"]
    assert "worst hit rate" in hits and "worst share of bytes" in share
    # tables are whole in a narrow terminal and in a pipe
    assert "..." not in out and "…" not in run(f"simulate compare {MEASURED}")[1]


def test_predictions_are_those_of_this_model():
    pytest.importorskip("numba", reason="the simulation needs the extra `model`")
    from numa_attention.machine import predictions
    from numa_attention.machine.h200_points import POINTS

    committed = {row["name"]: row for row in json.loads(PREDICTIONS.read_text())["predictions"]}
    for name in ("block-first-h32-16k", "swizzled-over-4-h32-16k-b4"):
        again = predictions.predict_point(POINTS[name])
        assert again["hit_rate"] == pytest.approx(committed[name]["hit_rate"], abs=0.02)
        assert again["closed_form_hit_rate"] == pytest.approx(
            committed[name]["closed_form_hit_rate"], abs=1e-6
        )


def test_no_vllm_is_imported(model):
    code = (
        "import sys\nfrom vllm_numa_backend import cli\n"
        f"sys.argv = 'numa-swizzle plan --model {model} --context 10M --machine mi300x --gpus 8 --json'.split()\n"
        "try:\n    cli.main()\nexcept SystemExit as ending:\n    assert not ending.code\n"
        "assert not {'vllm', 'torch', 'numba'} & set(sys.modules), 'imported too much'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
