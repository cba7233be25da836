"""The specification against torch's own attention, and against cases small enough to compute by hand."""

import math

import pytest
import torch

from numa_attention.reference import attention
from support import DTYPES, LAYOUTS, make_paged_case

INF = math.inf


def _gathered(case, request):
    """Keys and values of one request, [L, kv_heads, dim], by a walk over its tokens."""
    size = case.k_pages.shape[1]
    places = [(case.block_table[request, j // size], j % size) for j in range(int(case.seq_lens[request]))]
    return (torch.stack([pages[p, t] for p, t in places]).double() for pages in (case.k_pages, case.v_pages))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 5])
def test_agrees_with_torch(layout, causal, window):
    case = make_paged_case(query_lens=[1, 7, 20], seq_lens=[17, 40, 20], q_heads=6, kv_heads=2, head_dim=24,
                           head_dim_v=24 if layout == "interleaved" else 16, layout=layout)  # fmt: skip
    out, lse = attention(*case.arguments(), scale=0.3, causal=causal, window=window)
    assert not out.isnan().any() and not lse.isnan().any()
    for request, (length, queries) in enumerate(zip([17, 40, 20], [1, 7, 20], strict=True)):
        keys, values = (x.repeat_interleave(3, 1).transpose(0, 1) for x in _gathered(case, request))
        first = int(case.query_start_loc[request])
        q = case.q[first : first + queries].double().transpose(0, 1)
        position = torch.arange(length - queries, length)[:, None]
        key = torch.arange(length)[None, :]
        mask = (key <= position) | (not causal)
        if window >= 0:
            mask = mask & (key >= position - window) & (key <= position + window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=0.3
        )
        rows = slice(first, first + queries)
        torch.testing.assert_close(out[rows], expected.transpose(0, 1))
        scores = (q @ keys.transpose(1, 2) * 0.3).masked_fill(~mask, -INF)
        torch.testing.assert_close(lse[rows], scores.logsumexp(2).T)


def _one_head(queries, keys, values, **options):
    """Output and LSE, as lists, of one request with one head of one dimension."""
    pages = [torch.full((2, 16, 1, 1), math.nan) for _ in range(2)]
    for page, numbers in zip(pages, (keys, values), strict=True):
        page[1, : len(numbers), 0, 0] = torch.tensor(numbers)
    q = torch.tensor(queries).view(-1, 1, 1)
    starts, lengths, table = torch.tensor([0, len(queries)]), torch.tensor([len(keys)]), torch.tensor([[1]])
    out, lse = attention(q, *pages, starts, lengths, table, **({"scale": 1.0} | options))
    return out.flatten().tolist(), lse.flatten().tolist()


LOG3, LOG4 = math.log(3), math.log(4)
SPAN = torch.tensor([[[0, 1]]])


@pytest.mark.parametrize(
    ("queries", "keys", "values", "options", "out", "lse"),
    [
        # two keys with weights 1 : 3
        ([1.0], [0.0, LOG3], [4.0, 8.0], {}, [7.0], [LOG4]),
        # causal: the first of two queries sees one key of two
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {}, [4.0, 7.0], [0.0, LOG4]),
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"causal": False}, [7.0, 7.0], [LOG4, LOG4]),
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"causal": torch.tensor([False])}, [7.0, 7.0], [LOG4, LOG4]),
        # a window of 0 is the query's own position
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"window": 0}, [4.0, 8.0], [0.0, LOG3]),
        # without causal the window bounds both sides
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"window": 0, "causal": False}, [4.0, 8.0], [0.0, LOG3]),
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"window": 1, "causal": False}, [7.0, 7.0], [LOG4, LOG4]),
        # in a span queries see all of it, whatever the window; one that clamps lets it hide what is before
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"window": 0, "spans": SPAN}, [7.0, 7.0], [LOG4, LOG4]),
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"window": 0, "spans": SPAN, "clamp_spans": True}, [7.0, 8.0],
         [LOG4, LOG3]),
        ([1.0, 1.0], [0.0, LOG3], [4.0, 8.0], {"spans": SPAN + 1}, [4.0, 7.0], [0.0, LOG4]),
        # a sink of weight 4 beside 1 + 3 halves the output
        ([1.0], [0.0, LOG3], [4.0, 8.0], {"sinks": torch.tensor([LOG4])}, [3.5], [math.log(8)]),
        # scale, and the scales of a quantised cache
        ([1.0], [0.0, LOG3], [4.0, 8.0], {"scale": 0.5, "k_scale": 2.0, "v_scale": 10.0}, [70.0], [LOG4]),
        ([0.5], [0.0, LOG3], [4.0, 8.0], {"scale": 0.5, "q_scale": 4.0}, [7.0], [LOG4]),
        # a cap of 1 makes huge scores equal
        ([1.0], [100.0, 200.0], [4.0, 8.0], {"soft_cap": 1.0}, [6.0], [1 + math.log(2)]),
        # ALiBi: key 0 is 1 away and loses log 3
        ([1.0], [LOG3, LOG3], [4.0, 8.0], {"alibi_slopes": torch.tensor([LOG3])}, [7.0], [math.log(4)]),
        # its square root form: key 0 is 4 away and loses twice the slope, log 4
        ([1.0], [LOG4, -INF, -INF, -INF, LOG3], [4.0, 0.0, 0.0, 0.0, 8.0],
         {"alibi_slopes": torch.tensor([LOG4 / 2]), "alibi_sqrt": True}, [7.0], [LOG4]),
        # no keys
        ([1.0], [], [], {}, [0.0], [-INF]),
        ([1.0], [], [], {"causal": False}, [0.0], [-INF]),
        ([1.0], [], [], {"sinks": torch.tensor([2.0])}, [0.0], [2.0]),
        # a step padded past its sequence: the first query lies before every key
        ([1.0, 1.0], [LOG3], [4.0], {}, [0.0, 4.0], [-INF, LOG3]),
    ],
)  # fmt: skip
def test_cases_computed_by_hand(queries, keys, values, options, out, lse):
    got_out, got_lse = _one_head(queries, keys, values, **options)
    assert got_out == pytest.approx(out)
    assert got_lse == pytest.approx(lse)


def test_a_key_that_no_query_sees_may_be_nan():
    # recycled pages hold anything left of the window
    out, lse = _one_head([1.0], [math.nan, math.nan, 0.0], [math.nan, math.nan, 5.0], window=0)
    assert out == [5.0] and lse == [0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_query_heads_of_a_group_share_their_kv_head(dtype):
    case = make_paged_case(query_lens=[3], seq_lens=[33], q_heads=10, kv_heads=2, head_dim=32, dtype=dtype)
    out, lse = attention(*case.arguments(), scale=0.2)
    for head in range(10):
        alone = slice(head // 5, head // 5 + 1)
        one_out, one_lse = attention(
            case.q[:, head : head + 1], case.k_pages[:, :, alone], case.v_pages[:, :, alone],
            *case.arguments()[3:], scale=0.2,
        )  # fmt: skip
        torch.testing.assert_close(out[:, head : head + 1], one_out)
        torch.testing.assert_close(lse[:, head : head + 1], one_lse)
