"""paged_attention and write_kv against a float64 reference, and the bits of a row."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.cpu import checked

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KV_DTYPES = [*DTYPES, torch.int8]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, heads, size] as a cache of this dtype gives it back, in float64."""
    if dtype != torch.int8:
        return x.to(dtype).double()
    top = x.float().abs().amax(-1, keepdim=True)
    return (
        torch.round(x.float() * (torch.full_like(top, 127) / top)).double() * (top / 127).double()
    )


@dataclass
class Case:
    """Sequences (queries, context) over one cache whose unused memory is NaN."""

    sequences: list[tuple[int, int]]
    q_heads: int = 4
    kv_heads: int = 2
    d: int = 64
    dv: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    seed: int = 0
    shared: int = 0  # leading positions that all sequences have in common, blocks included
    padding: int = 0  # rows after the last sequence, and as many sequences of no query
    q: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        scale = 2.0 if self.softcap else 1.0
        total = sum(n for n, _ in self.sequences) + self.padding

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        self.total = total
        # q, k and v are views into one fused matrix, as a model's projection gives them.
        widths = [self.q_heads * self.d, self.kv_heads * self.d, self.kv_heads * self.dv]
        self.fused = normal(total, sum(widths))
        self.q = self.fused[:, : widths[0]].view(total, self.q_heads, self.d)
        self.q.mul_(scale)
        longest = max((c for _, c in self.sequences), default=0)
        self.keys = [normal(c, self.kv_heads, self.d) for _, c in self.sequences]
        self.values = [normal(c, self.kv_heads, self.dv) for _, c in self.sequences]
        self.sink_logits = torch.randn(self.q_heads, generator=g) if self.sinks else None
        per = -(-longest // self.block_size) + 1
        used = len(self.sequences) * per
        order = torch.randperm(used + 3, generator=g).to(torch.int32)[:used]
        count = len(self.sequences) + self.padding
        self.tables = torch.full((count, per), -1, dtype=torch.int32)
        for keys, values in zip(self.keys[1:], self.values[1:], strict=True):
            keys[: self.shared] = self.keys[0][: self.shared]
            values[: self.shared] = self.values[0][: self.shared]
        codes = self.kv_dtype == torch.int8
        shapes = cpu.kv_shapes(
            used + 3, self.kv_heads, self.d, self.dv, self.block_size, scales=codes
        )
        # Of an int8 cache, the bytes of a scale that is NaN.
        nothing = -1 if codes else float("nan")
        self.k_cache, self.v_cache = (
            torch.full(shape, nothing, dtype=self.kv_dtype) for shape in shapes
        )
        for s, (_, context) in enumerate(self.sequences):
            need = -(-context // self.block_size)
            self.tables[s, :need] = order[s * per : s * per + need]
            common = self.shared // self.block_size
            self.tables[s, :common] = self.tables[0, :common]
            position = torch.arange(context)
            blocks = self.tables[s].long()[position // self.block_size]
            slots = blocks * self.block_size + position % self.block_size
            self.write(slots, self.keys[s], self.values[s])
        self.slots_of_last = slots if self.sequences else None

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        step = cpu.WriteStep(
            slots,
            k_row_stride=k.stride(0),
            v_row_stride=v.stride(0),
            dtype=k.dtype,
            kv_dtype=self.kv_dtype,
            kv_heads=self.kv_heads,
            head_size=self.d,
            head_size_v=self.dv,
            block_size=self.block_size,
        )
        checked.write_kv(step, self.k_cache, self.v_cache, k, v)

    def run(
        self, pick: list[tuple[int, int, int]] | None = None, forget: bool = True
    ) -> torch.Tensor:
        """Attention of pieces (sequence, first query, queries) as one batch; rows end to end."""
        if pick is None:
            pick = [(s, 0, n) for s, (n, _) in enumerate(self.sequences)]
        starts, rows, contexts, tables = [0], [], [], []
        first_row = list(itertools.accumulate([0] + [n for n, _ in self.sequences]))
        for s, first, n in pick:
            queries, context = self.sequences[s]
            rows += range(first_row[s] + first, first_row[s] + first + n)
            starts.append(starts[-1] + n)
            contexts.append(context - queries + first + n)
            table = self.tables[s].clone()
            # What no query sees may already belong to somebody else, or to nobody.
            table[-(-contexts[-1] // self.block_size) :] = -1
            if self.window and forget:
                table[: max(0, contexts[-1] - n + 1 - self.window) // self.block_size] = -1
            tables.append(table)
        for _ in range(self.padding):
            starts.append(starts[-1])
            contexts.append(0)
            tables.append(torch.full_like(self.tables[0], -1))
        rows += range(self.total - self.padding, self.total)
        q = self.fused[rows][:, : self.q_heads * self.d].view(len(rows), self.q_heads, self.d)
        out = torch.full((len(rows), self.q_heads, self.dv), 7.0, dtype=self.dtype)
        step = cpu.AttentionStep(
            torch.stack(tables),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            q_row_stride=q.stride(0),
            out_row_stride=out.stride(0),
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_size=self.d,
            head_size_v=self.dv,
            block_size=self.block_size,
        )
        layer = cpu.AttentionLayer(
            self.d**-0.5, window=self.window, softcap=self.softcap, sinks=self.sink_logits
        )
        checked.paged_attention(step, layer, out, q, self.k_cache, self.v_cache)
        assert (out[starts[-1] :] == 7).all(), "rows past the last sequence were written"
        return out[: starts[-1]]

    def reference(self) -> torch.Tensor:
        """In float64, from the plain keys and values rounded as the cache rounds them."""
        outs = []
        row = 0
        group = self.q_heads // self.kv_heads
        for s, (n, context) in enumerate(self.sequences):
            q = self.q[row : row + n].double()
            row += n
            k = as_stored(self.keys[s], self.kv_dtype).repeat_interleave(group, 1)
            v = as_stored(self.values[s], self.kv_dtype).repeat_interleave(group, 1)
            scores = torch.einsum("nhd,chd->hnc", q, k) * self.d**-0.5
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            position = torch.arange(context - n, context)[:, None]
            key = torch.arange(context)[None]
            hidden = key > position
            if self.window:
                hidden |= key <= position - self.window
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.sink_logits is not None:
                sink = self.sink_logits.double()[:, None, None].expand(-1, n, 1)
                weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            outs.append(torch.einsum("hnc,chd->nhd", weights, v))
        return torch.cat(outs)

    def check(self) -> None:
        torch.testing.assert_close(
            self.run().double(),
            self.reference(),
            rtol=TOLERANCE[self.dtype],
            atol=TOLERANCE[self.dtype] * 2,
        )


RAGGED = [(1, 1), (5, 5), (1, 40), (17, 130), (3, 64), (1, 65), (70, 70), (2, 16)]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    Case(RAGGED, dtype=dtype, kv_dtype=kv_dtype, padding=2).check()


@pytest.mark.parametrize(
    ("d", "dv"),
    [(8, 8), (16, 16), (40, 24), (64, 64), (72, 80), (128, 128), (192, 128), (256, 256)],
)
def test_head_sizes(isa: str, d: int, dv: int) -> None:
    Case([(1, 33), (9, 70), (1, 5)], d=d, dv=dv).check()


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (9, 3), (7, 1), (8, 1), (12, 2), (71, 1)])
def test_head_groups(isa: str, heads: tuple[int, int]) -> None:
    Case([(1, 33), (20, 70), (3, 3)], q_heads=heads[0], kv_heads=heads[1]).check()


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes(isa: str, block_size: int) -> None:
    for kv_dtype in (torch.float32, torch.bfloat16):
        Case([(1, 200), (30, 130), (1, 1)], block_size=block_size, kv_dtype=kv_dtype).check()


@pytest.mark.parametrize("window", [1, 7, 16, 64, 100, 700])
def test_windows(isa: str, window: int) -> None:
    Case([(1, 1300), (50, 150), (1, 3), (150, 150)], window=window).check()


def test_soft_cap_and_sinks(isa: str) -> None:
    Case(RAGGED, softcap=1.5).check()
    Case(RAGGED, sinks=True).check()
    Case([(1, 600), (33, 90)], sinks=True, softcap=20.0, window=50).check()


def test_long_and_many(isa: str) -> None:
    Case([(1, 2100)], q_heads=9, kv_heads=3).check()
    Case([(130, 1100), (1, 900)] + [(1, 20 + i) for i in range(20)]).check()


def test_random(isa: str) -> None:
    r = random.Random(7)
    for seed in range(25):
        kv_heads = r.choice([1, 2, 3])
        sequences = [(n, n + r.choice([0, 1, 15, 60, 600])) for n in r.choices(range(1, 40), k=4)]
        Case(
            sequences,
            q_heads=kv_heads * r.randint(1, 5),
            kv_heads=kv_heads,
            d=8 * r.randint(1, 20),
            dv=8 * r.randint(1, 20),
            block_size=16 * r.randint(1, 3),
            dtype=r.choice(DTYPES),
            kv_dtype=r.choice(KV_DTYPES),
            window=r.choice([0, 0, r.randint(1, 300)]),
            softcap=r.choice([0.0, 0.0, 5.0]),
            sinks=r.random() < 0.3,
            padding=r.randint(0, 2),
            seed=seed,
        ).check()


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (14, 2)])
@pytest.mark.parametrize("window", [0, 37, 530])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_bits_do_not_depend_on_company(
    isa: str, heads: tuple[int, int], window: int, kv_dtype: torch.dtype
) -> None:
    sequences = [(90, 1200), (1, 1700), (1, 20), (130, 130), (7, 520)]
    case = Case(
        sequences,
        q_heads=heads[0],
        kv_heads=heads[1],
        window=window,
        kv_dtype=kv_dtype,
        sinks=window == 37,
    )
    together = case.run()
    cpu.set_threads(1)
    assert torch.equal(case.run(), together)
    alone = torch.cat([case.run([(s, 0, n)]) for s, (n, _) in enumerate(sequences)])
    assert torch.equal(alone, together)
    cpu.set_threads()
    alone = torch.cat([case.run([(s, 0, n)]) for s, (n, _) in enumerate(sequences)])
    assert torch.equal(alone, together)
    chunked = []
    for s, (n, _) in enumerate(sequences):
        for first in range(0, n, 13):
            chunked.append(case.run([(s, first, min(13, n - first))]))
    assert torch.equal(torch.cat(chunked), together)
    one_by_one = [case.run([(s, i, 1)]) for s, (n, _) in enumerate(sequences) for i in range(n)]
    assert torch.equal(torch.cat(one_by_one), together)


SHARING = [(1, 700), (1, 530), (1, 1000), (2, 620), (1, 900), (1, 513), (40, 560), (1, 1024)]


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (14, 2)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("shared", [256, 400, 512])
def test_shared_prefixes(
    isa: str, heads: tuple[int, int], kv_dtype: torch.dtype, shared: int
) -> None:
    """Sequences that share blocks read them together, and every row keeps the bits it has alone."""
    case = Case(SHARING, q_heads=heads[0], kv_heads=heads[1], kv_dtype=kv_dtype, shared=shared)
    case.check()
    together = case.run()
    alone = torch.cat([case.run([(s, 0, n)]) for s, (n, _) in enumerate(SHARING)])
    assert torch.equal(alone, together)
    cpu.set_threads(1)
    assert torch.equal(case.run(), together)
    cpu.set_threads()


def test_prefixes_shared_in_several_groups(isa: str) -> None:
    """Two groups, one sequence of neither, and members whose shared parts differ in length."""
    case = Case([(1, 800)] * 7, q_heads=9, kv_heads=3)
    for member, leader, positions in ((2, 0, 256), (4, 0, 768), (3, 1, 512), (6, 1, 256)):
        blocks = positions // case.block_size
        case.tables[member, :blocks] = case.tables[leader, :blocks]
        case.keys[member][:positions] = case.keys[leader][:positions]
        case.values[member][:positions] = case.values[leader][:positions]
    case.check()
    together = case.run()
    assert torch.equal(torch.cat([case.run([(s, 0, 1)]) for s in range(7)]), together)
    many = Case(
        [(1, 600)] * 100, q_heads=4, kv_heads=1, shared=512
    )  # more rows than one item takes
    many.check()


def test_nan_in_is_nan_out(isa: str) -> None:
    case = Case([(1, 30), (1, 30)])
    case.q[0, 1] = float("nan")
    out = case.run()
    assert out[0, 1].isnan().all()
    assert not out[0, 0].isnan().any()
    assert not out[1].isnan().any()


def test_large_scores(isa: str) -> None:
    case = Case([(3, 100)])
    case.q.mul_(100)
    torch.testing.assert_close(case.run().double(), case.reference(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_touches_only_its_slots(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = Case([(1, 1)], d=24, dv=40, block_size=32, dtype=dtype, kv_dtype=kv_dtype)
    case.k_cache = torch.full((9, 2, 24, 32), 3.0, dtype=kv_dtype)  # float dtypes only
    case.v_cache = torch.full((9, 2, 32, 40), 3.0, dtype=kv_dtype)
    slots = torch.randperm(9 * 32)[:100]
    slots[:50] = torch.arange(60, 110)  # a run across blocks
    slots[50:] = slots[50:][torch.tensor([s not in range(60, 110) for s in slots[50:].tolist()])][
        torch.arange(50) % 30
    ]
    seen: set[int] = set()
    for i, s in enumerate(slots.tolist()):
        if s in seen or i % 11 == 3:
            slots[i] = -1
        seen.add(s)
    fused = torch.randn(100, 2 * 64).to(dtype)
    k, v = fused[:, :48].view(100, 2, 24), fused[:, 48:].view(100, 2, 40)
    case.write(slots, k, v)
    want_k, want_v = torch.full_like(case.k_cache, 3.0), torch.full_like(case.v_cache, 3.0)
    for i, s in enumerate(slots.tolist()):
        if s >= 0:
            want_k[s // 32, :, :, s % 32] = k[i].to(kv_dtype)
            want_v[s // 32, :, s % 32] = v[i].to(kv_dtype)
    assert torch.equal(case.k_cache, want_k)
    assert torch.equal(case.v_cache, want_v)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_a_run_of_tokens_writes_what_each_alone_writes(isa: str, kv_dtype: torch.dtype) -> None:
    """Neighbours in a block are written together, from any place in it and in any number."""
    d, dv, block = 40, 24, 32
    case = Case([(1, 1)], d=d, dv=dv, block_size=block, kv_dtype=kv_dtype)
    shapes = cpu.kv_shapes(6, 2, d, dv, block, scales=kv_dtype == torch.int8)
    g = torch.Generator().manual_seed(3)
    for first, count in [
        (0, 192),
        (5, 70),
        *((first, n) for first in (0, 9) for n in range(1, 20)),
    ]:
        k, v = torch.randn(count, 2, d, generator=g), torch.randn(count, 2, dv, generator=g)
        k[count // 2, 0, 3], v[count // 3, 1, 7] = float("inf"), float("nan")
        k[count // 4, 1] = 0
        slots = torch.arange(first, first + count)
        case.k_cache, case.v_cache = (torch.zeros(shape, dtype=kv_dtype) for shape in shapes)
        case.write(slots, k, v)
        together = case.k_cache.clone(), case.v_cache.clone()
        case.k_cache, case.v_cache = (torch.zeros(shape, dtype=kv_dtype) for shape in shapes)
        for i in range(count):
            case.write(slots[i : i + 1], k[i : i + 1], v[i : i + 1])
        for whole, single in zip(together, (case.k_cache, case.v_cache), strict=True):
            assert torch.equal(whole.view(torch.uint8), single.view(torch.uint8))


def test_what_cannot_be_is_refused() -> None:
    for sizes in [(64, 64, 8), (64, 64, 24), (65, 64, 16), (64, 264, 16), (64, 64, 0)]:
        with pytest.raises(ValueError, match="multiple of"):
            cpu.kv_shapes(1, 1, *sizes)
    case = Case([(2, 20)])
    with pytest.raises(ValueError, match="do not divide"):
        Case([(2, 20)], q_heads=3).run()
    case.tables[0, 1] = 99
    with pytest.raises(ValueError, match="not in the cache"):
        case.run()
    with pytest.raises(ValueError, match="outside"):
        case.write(torch.tensor([10**6]), case.keys[0][:1], case.values[0][:1])
    with pytest.raises(TypeError, match="int64"):
        case.write(torch.tensor([1], dtype=torch.int32), case.keys[0][:1], case.values[0][:1])


def test_write_int8_touches_only_its_slots(isa: str) -> None:
    case = Case([(1, 1)], d=24, dv=40, block_size=32, kv_dtype=torch.int8)
    k_shape, v_shape = cpu.kv_shapes(5, 2, 24, 40, 32, scales=True)
    case.k_cache = torch.full(k_shape, 77, dtype=torch.int8)
    case.v_cache = torch.full(v_shape, 77, dtype=torch.int8)
    slots = torch.tensor([33, 34, -1, 159, 0])
    k, v = torch.randn(5, 2, 24), torch.randn(5, 2, 40)
    k[3, 1] = 0
    k[4, 0, 5] = float("nan")
    case.write(slots, k, v)
    for cache, x, transposed in ((case.k_cache, k, True), (case.v_cache, v, False)):
        size = x.shape[2]
        codes = cache[:, :, : size * 32].reshape(5, 2, *((size, 32) if transposed else (32, size)))
        codes = codes.transpose(2, 3) if transposed else codes  # [blocks, heads, positions, size]
        scales = cache[:, :, size * 32 :].contiguous().view(torch.float32)
        written = torch.zeros(5, 32, dtype=torch.bool)
        for i, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            block, at = divmod(slot, 32)
            written[block, at] = True
            for head in range(2):
                got = codes[block, head, at].float() * scales[block, head, at]
                want = x[i, head]
                if bool(want.isnan().any()):
                    assert bool(got.isnan().all())
                else:
                    assert bool(((got - want).abs() <= want.abs().amax() / 253).all())
        untouched = codes.permute(0, 2, 1, 3)[~written]
        assert bool((untouched == 77).all())
