"""The kernel of segment attention in Triton."""

import triton
import triton.language as tl


@triton.jit
def _run(starts, stops, followings, runs, rows, row):
    """What a block must know of its row. Had before the block is fetched: else Triton's pipeline
    would wait for it.
    """
    q_start = tl.load(runs + row)
    return (tl.load(starts + row), tl.load(stops + row), tl.load(followings + row),
            q_start, q_start + tl.load(runs + rows + row), tl.load(runs + 2 * rows + row),
            tl.load(runs + 4 * rows + row), tl.load(runs + 5 * rows + row),
            tl.load(runs + 6 * rows + row))


@triton.jit
def _numbers(stored):
    """What is stored as numbers that tensor cores take; all of int8 and fp8 are in bfloat16."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.uint32)
        # The four bits of the exponent are the lowest of float32's, whose bias is 120 larger.
        number = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number * 1.329227995784916e36)
        numbers = number.to(tl.bfloat16)
    elif stored.dtype == tl.int8:
        numbers = stored.to(tl.float32).to(tl.bfloat16)
    else:
        numbers = stored
    return numbers


@triton.jit
def _product(x, block, PRECISE: tl.constexpr):
    """x times a block, summed in float32; a precise one is of x in two parts of bfloat16."""
    if PRECISE:
        high = x.to(block.dtype)
        low = (x - high.to(tl.float32)).to(block.dtype)
        return tl.dot(high, block, tl.dot(low, block))
    return tl.dot(x.to(block.dtype), block, input_precision="ieee")


@triton.jit
def _tanh(x):
    small = tl.exp(-2 * tl.abs(x))
    return tl.where(x < 0, small - 1, 1 - small) / (1 + small)


@triton.jit
def segment_attention(
        q, under_sine, turns, query_raw, births, runs, starts, stops, followings, work,
        k, k_scales, v, v_scales, queries, rows, shares, m_out, l_out, acc_out,
        VECTORS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
        WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr):
    """One share of the blocks of keys that a tile of queries sees with one KV head.

    The program's vectors are its queries, each with the heads that share the KV head. A loop goes
    over blocks, whatever rows they belong to, so that the next are fetched while one is worked on.
    """
    tile, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    vector, dim = tl.arange(0, VECTORS), tl.arange(0, DIMS)
    query = tile * SIZE + vector // GROUP
    is_real = (vector < SIZE * GROUP) & (query < queries)
    place = query * HEADS + kv_head * GROUP + vector % GROUP
    raw = tl.load(query_raw + query, is_real, other=-1)
    born = tl.load(births + query, is_real, other=0)
    of_vector = place[:, None] * DIM + dim[None, :]
    is_number = is_real[:, None] & (dim < DIM)[None, :]

    work += (tile * shares + share) * 3
    row, block, count = tl.load(work), tl.load(work + 1), tl.load(work + 2)
    starts += tile * rows
    stops += tile * rows
    followings += tile * rows
    start, stop, following, q_start, q_stop, slot, first_raw, position, until = _run(
        starts, stops, followings, runs, rows, row)
    m = tl.full([VECTORS], float("-inf"), tl.float32)
    l = tl.zeros([VECTORS], tl.float32)  # noqa: E741
    acc = tl.zeros([VECTORS, DIMS], tl.float32)
    turned = tl.zeros([VECTORS, DIMS], tl.float32 if EXACT or SCALED else tl.bfloat16)
    for i in range(count):
        if (i == 0) | (block == 0):
            turn = turns + row * 2 * DIM + dim
            cos = tl.load(turn, dim < DIM, other=1.0)[None, :]
            sin = tl.load(turn + DIM, dim < DIM, other=0.0)[None, :]
            turned = (tl.load(q + of_vector, is_number, other=0.0) * cos
                      + tl.load(under_sine + of_vector, is_number, other=0.0) * sin
                      ).to(turned.dtype)
        key = start + block * KEYS + tl.arange(0, KEYS)
        is_inside = key < stop
        at = (slot + key).to(tl.int64) * KV_HEADS + kv_head
        is_there = is_inside[:, None] & (dim < DIM)[None, :]
        of_key = at[:, None] * DIM + dim[None, :]

        scores = _product(turned, _numbers(tl.load(k + of_key, is_there, other=0)).T, SCALED)
        if SCALED:
            scores *= tl.load(k_scales + at, is_inside, other=0.0)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP * _tanh(scores / SOFTCAP)
        is_of_row = (q_start <= query) & (query < q_stop) & (raw < until)
        visible = is_inside[None, :] & is_of_row[:, None] & (
            (first_raw + key)[None, :] <= raw[:, None])
        if WINDOW > 0:
            visible &= born[:, None] - (position + key)[None, :] < WINDOW
        scores = tl.where(visible, scores, float("-inf"))

        largest = tl.maximum(m, tl.max(scores, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        weights, old = tl.exp(scores - base[:, None]), tl.exp(m - base)
        m, l = largest, old * l + tl.sum(weights, 1)  # noqa: E741
        if SCALED:
            weights *= tl.load(v_scales + at, is_inside, other=0.0)[None, :]
        values = _numbers(tl.load(v + of_key, is_there, other=0))
        acc = old[:, None] * acc + _product(weights, values, SCALED)

        is_last = start + (block + 1) * KEYS >= stop
        row, block = tl.where(is_last, following, row), tl.where(is_last, 0, block + 1)
        start, stop, following, q_start, q_stop, slot, first_raw, position, until = _run(
            starts, stops, followings, runs, rows, row)

    place += share * queries * HEADS
    tl.store(m_out + place, m, is_real)
    tl.store(l_out + place, l, is_real)
    tl.store(acc_out + place[:, None] * DIM + dim[None, :], acc, is_number)
