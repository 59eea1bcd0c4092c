"""Quantised K and V: from the codes of a cache to float16 tiles, and where their scales go.

Codes are loaded as 16-bit words, which pipelines and tensor cores take as they are. A word holds two 8-bit codes or
four 4-bit ones, so a tile of words becomes two or four tiles, its parts, by shifts and masks in registers. The product
with K is the sum of the products with its parts; each part of V has an accumulator of its own. The maths is float16,
which holds every code exactly, and queries are scaled by a power of two per row so that none overflows there. A cache
without codes is one part, as it is.

Integer codes take no conversion. The bits of an integer u below 1024 are those of the float16 u 2^-24, which tensor
cores multiply exactly, so a mask is all that a code needs, and 2^24 joins a factor that is there anyway. They are
unsigned then, and what means 0 (128, 8, or a zero point) takes its share of the query's sum, or of the weights'.

No scale is multiplied to an element where that can be avoided. One per tensor or head joins the score's factor, or the
finished accumulator; per channel it joins the query; per token it multiplies a column of scores or of weights, and so
does one per group where a part lies in one group.

A FORM is a CodeFormat, or None without codes.
"""

import math

import triton
import triton.language as tl

from flash_decoding.backends.triton.tile_io import INTERPRETED, add_product, by_column, by_row, matmul, point_to_rows

# Queries are scaled to where float16 keeps even those exactly that are far smaller than the largest of their row.
_QUERY_EXPONENT = tl.constexpr(14)
# Columns, for each warp, of the product that sums weights up (rows, if turned); all are equal, and fewer are not
# multiplied any faster.
_SUM_COLUMNS = tl.constexpr(8)
_SUM_ROWS = tl.constexpr(16)
# The unit of acc before any scale was seen; a normal number, so that dividing by it is safe.
LEAST_SCALE = tl.constexpr(2.0**-126)
# The unit is this much smaller than the largest scale, so that float16 holds weights of keys whose scales are far below
# it: up to 2^15 fits.
_UNIT_FACTOR = tl.constexpr(2.0**-15)


@triton.constexpr_function
def parts_of(FORM):
    """Codes in a word."""
    return 1 if FORM is None else 4 if FORM.codes == "int4" else 2


@triton.constexpr_function
def words_of(WIDTH, FORM):
    """Words in a row of so many elements; without codes, the elements."""
    return WIDTH // parts_of(FORM)


def has_scale_pairs(WIDTH, FORM):
    """Whether the scales of a row that multiply columns, and the zero points between them, are even in number."""
    return (
        _is_scaled_by_key(WIDTH, FORM) and FORM.group is not None and (FORM.zero_point or WIDTH // FORM.group % 2 == 0)
    )


@triton.constexpr_function
def parts_per_group(WIDTH, FORM):
    """How many parts of a row lie in each group; 0 where a part lies in several."""
    words = words_of(WIDTH, FORM)
    return FORM.group // words if FORM.group % words == 0 else 0


@triton.constexpr_function
def zero_of(FORM):
    """The unsigned code that means 0 without a zero point; 0 for codes that are numbers already."""
    return 0.0 if FORM is None else {"int8": 128.0, "int4": 8.0}.get(FORM.codes, 0.0)


@triton.constexpr_function
def factor_of(part, FORM):
    """What a widened code of a part has to be multiplied with."""
    if zero_of(FORM) == 0.0:
        return 1.0
    return 2.0**20 if FORM.codes == "int4" and part % 2 == 1 else 2.0**24


@triton.constexpr_function
def _score_factor(WIDTH, FORM):
    """What the product with the first part of K has to be multiplied with."""
    return 1.0 if _is_scaled_by_element(WIDTH, FORM) else factor_of(0, FORM)


@triton.constexpr_function
def _query_factor(part, WIDTH, FORM):
    """What makes a part's product as large as the first one's."""
    return 1.0 if _is_scaled_by_element(WIDTH, FORM) else factor_of(part, FORM) / factor_of(0, FORM)


def scales_per_key(WIDTH, FORM):
    """How many scales multiply columns of a key's scores or weights; infinity where they multiply elements."""
    if _is_scaled_by_element(WIDTH, FORM):
        return math.inf
    return _groups_to_sum(WIDTH, FORM) if _is_scaled_by_key(WIDTH, FORM) else 0


@triton.jit
def column_of(word, part, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Which element of a row a word's part is."""
    if parts_of(FORM) == 2:
        column = 2 * word + part
    else:
        column = part * words_of(WIDTH, FORM) + word
    return column


@triton.jit
def widen(words, FORM: tl.constexpr, FP8_CONVERT: tl.constexpr):
    """The parts of a tile of words, float16; without codes the tile itself.

    Args:
        FP8_CONVERT: whether the GPU has an instruction for e4m3, as those from compute capability 8.9 on have.
    """
    if FORM is None:
        parts = (words,)
    elif INTERPRETED or (FORM.codes == "fp8_e4m3" and not FP8_CONVERT):
        parts = _widen_plainly(words, FORM)
    elif FORM.codes == "fp8_e4m3":
        parts = tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b; .reg .b32 sorted;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {a, b}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM.codes == "fp8_e5m2":
        # A code is the upper byte of a float16.
        parts = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM.codes == "int8":
        # 0x6a is (a & b) ^ c: the sign bit turned makes code + 128.
        parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 s;
            shr.u32 s, $2, 8;
            lop3.b32 $0, $2, 0x00ff00ff, 0x00800080, 0x6a;
            lop3.b32 $1, s, 0x00ff00ff, 0x00800080, 0x6a;
            }""",
            "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # The second and the fourth part are 16 times as large.
        parts = tl.inline_asm_elementwise(
            """{
            .reg .b32 s;
            shr.u32 s, $4, 8;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, $4, 0x00f000f0;
            and.b32 $2, s, 0x000f000f;
            and.b32 $3, s, 0x00f000f0;
            }""",
            "=&r,=&r,=&r,=r,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return parts


@triton.jit
def _widen_plainly(words, FORM: tl.constexpr):
    """widen() in integers that every GPU and the interpreter have."""
    bits = words.to(tl.int32)
    parts = ()
    for i in tl.static_range(parts_of(FORM)):
        if FORM.codes == "int4":
            x = ((bits >> (8 * (i // 2))) & (15 << (4 * (i % 2)))).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            code = (bits >> (8 * i)) & 255
            if FORM.codes == "int8":
                x = (code ^ 128).to(tl.int16).to(tl.float16, bitcast=True)
            elif FORM.codes == "fp8_e5m2":
                x = (code << 8).to(tl.int16).to(tl.float16, bitcast=True)
            else:
                # Four bits of exponent where a float16 has five: 2^8 too small, subnormal numbers included.
                magnitude = (code & 127) << 7
                x = ((code & 128) << 8 | magnitude).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
                x = tl.where(magnitude == 127 << 7, float("nan"), x.to(tl.float32)).to(tl.float16)
        parts = parts + (x,)
    return parts


@triton.jit
def load_queries(
    q_at, in_token, START: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """The elements of rows of q that meet the keys' words from START on, a tile [M, BLOCK] for each part."""
    word = START + tl.arange(0, BLOCK)
    mask = in_token[:, None] & (word < words_of(WIDTH, FORM))[None, :]
    parts = ()
    for i in tl.static_range(parts_of(FORM)):
        parts = parts + (tl.load(q_at + column_of(word, i, WIDTH, FORM)[None, :], mask=mask, other=0.0),)
    return parts


@triton.jit
def locate_scales(ptr, stride, b, h_kv, FORM: tl.constexpr, IS_PAGED: tl.constexpr):
    """Where the scales of a head begin, or those of its sequence."""
    if FORM.scale == "head":
        ptr += h_kv
    elif FORM.scale != "tensor":
        ptr += h_kv.to(tl.int64) * stride[1]
        if not IS_PAGED:
            ptr += b * stride[0]
    return ptr


@triton.jit
def scale_queries(
    q, scale, scale_ptr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, REST_D: tl.constexpr, FORM: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """(q as float16 parts, each row's scale of scores, the share of zeros), with the keys' scales that are not by key.

    The share of zeros is the sum of a row's elements, [M], of each group of whole parts, in units of the product.
    """
    PARTS: tl.constexpr = parts_of(FORM)
    wide, largest = (), tl.zeros([q[0].shape[0]], tl.float32)
    for i in tl.static_range(len(q)):
        x = q[i].to(tl.float32)
        if FORM.scale == "channel":
            word = tl.arange(0, BLOCK_D) if i < PARTS else BLOCK_D + tl.arange(0, REST_D)
            column = column_of(word, i % PARTS, WIDTH, FORM)
            x *= tl.load(scale_ptr + column, mask=word < words_of(WIDTH, FORM), other=0.0)[None, :]
        wide = wide + (x,)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, _QUERY_EXPONENT + 1)
    factor = ((254 - exponent + _QUERY_EXPONENT) << 23).to(tl.float32, bitcast=True)
    scale *= _score_factor(WIDTH, FORM)
    if scale_ptr is not None:
        if FORM.scale == "tensor" or FORM.scale == "head":
            scale *= tl.load(scale_ptr)
    scale *= by_row(((exponent - _QUERY_EXPONENT) << 23).to(tl.float32, bitcast=True), TURNED)
    narrow, sums = (), ()
    for i in tl.static_range(len(q)):
        x = wide[i] * (factor * _query_factor(i % PARTS, WIDTH, FORM))[:, None]
        narrow = narrow + (x.to(tl.float16),)
    if FORM.scale == "channel":
        # A query times a scale has more bits than one float16: what it lacks is as many parts more.
        for i in tl.static_range(len(q)):
            x = wide[i] * (factor * _query_factor(i % PARTS, WIDTH, FORM))[:, None]
            narrow = narrow + ((x - narrow[i].to(tl.float32)).to(tl.float16),)
    if _has_zeros(WIDTH, FORM):
        PER_GROUP: tl.constexpr = len(narrow) // _groups_to_sum(WIDTH, FORM)
        for g in tl.static_range(_groups_to_sum(WIDTH, FORM)):
            total = tl.zeros([q[0].shape[0]], tl.float32)
            for i in tl.static_range(g * PER_GROUP, (g + 1) * PER_GROUP):
                total += tl.sum(narrow[i].to(tl.float32), 1) / factor_of(i % PARTS, FORM)
            sums = sums + (total,)
    return narrow, scale, sums


@triton.jit
def multiply_keys(
    q, q_sums, k, scales, in_n, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, FORM: tl.constexpr, TURNED: tl.constexpr
):
    """q k^T, [M, N] or TURNED, with the scales that differ by key; q and k are tuples of parts."""
    if _is_scaled_by_element(WIDTH, FORM):
        k = _scale_elements(k, scales, in_n, WIDTH, BLOCK_D, FORM)
    a, b = q, k
    if TURNED:
        a, b = k, q
    GROUPS: tl.constexpr = _groups_to_sum(WIDTH, FORM)
    PER_GROUP: tl.constexpr = len(k) // GROUPS
    if _is_scaled_by_key(WIDTH, FORM):
        by_group, zeros = _load_scales(scales, in_n, GROUPS, FORM)
    for g in tl.static_range(GROUPS):
        if _has_zeros(WIDTH, FORM) and not FORM.zero_point:
            product = _zero_tile(q[0].shape[0], k[0].shape[0], TURNED) + by_row(q_sums[g] * -zero_of(FORM), TURNED)
            product = add_product(product, a[g * PER_GROUP], tl.trans(b[g * PER_GROUP]))
        else:
            product = matmul(a[g * PER_GROUP], tl.trans(b[g * PER_GROUP]))
        for i in tl.static_range(g * PER_GROUP + 1, (g + 1) * PER_GROUP):
            product = add_product(product, a[i], tl.trans(b[i]))
        for i in tl.static_range(len(k), len(q)):  # what queries times scales per channel lack
            product = add_product(product, a[i % len(a)], tl.trans(b[i % len(b)]))
        if _is_scaled_by_key(WIDTH, FORM):
            if FORM.zero_point:
                product -= by_row(q_sums[g], TURNED) * by_column(zeros[g], TURNED)
            product *= by_column(by_group[g], TURNED)
        if g == 0:
            s = product
        else:
            s += product
    return s


@triton.constexpr_function
def _is_scaled_by_key(WIDTH, FORM):
    """Whether scales multiply columns of scores or of weights."""
    if FORM is None:
        return False
    return FORM.scale == "token" or (FORM.scale == "group" and parts_per_group(WIDTH, FORM) > 0)


@triton.constexpr_function
def _is_scaled_by_element(WIDTH, FORM):
    """Whether scales and zeros are different inside a part."""
    return FORM is not None and FORM.scale == "group" and parts_per_group(WIDTH, FORM) == 0


@triton.constexpr_function
def _has_zeros(WIDTH, FORM):
    """Whether products are too large by the share of what means 0."""
    return zero_of(FORM) > 0.0 and not _is_scaled_by_element(WIDTH, FORM)


@triton.constexpr_function
def _groups_to_sum(WIDTH, FORM):
    """Of how many groups of parts the products are scaled apart."""
    return WIDTH // FORM.group if _is_scaled_by_key(WIDTH, FORM) and FORM.scale == "group" else 1


@triton.jit
def weigh_values(acc, unit, alpha, p, v, scales, in_n, WIDTH: tl.constexpr, FORM: tl.constexpr, TURNED: tl.constexpr):
    """(acc * alpha + p v, its unit), with the scales that differ by key; v are parts, acc as zero_acc() has it.

    Weights times scales might leave the range of float16: acc is in a unit that follows the largest scale seen so far.
    """
    if _is_scaled_by_element(WIDTH, FORM):
        v = _scale_elements(v, scales, in_n, WIDTH, v[0].shape[1], FORM)
    GROUPS: tl.constexpr = _groups_to_sum(WIDTH, FORM)
    PER_GROUP: tl.constexpr = len(v) // GROUPS
    weights = (p.to(v[0].dtype),)
    if _is_scaled_by_key(WIDTH, FORM):
        by_group, zeros = _load_scales(scales, in_n, GROUPS, FORM)
        largest = tl.abs(by_group[0])
        for g in tl.static_range(1, GROUPS):
            largest = tl.maximum(largest, tl.abs(by_group[g]))
        new_unit = tl.maximum(unit, tl.max(largest, 0) * _UNIT_FACTOR)
        alpha, unit = alpha * (unit / new_unit), new_unit
        weights = ()
        for g in tl.static_range(GROUPS):
            weights = weights + ((p * by_column(by_group[g] / unit, TURNED)).to(v[0].dtype),)
    alpha = by_row(alpha, TURNED)
    folded = ()
    for i in tl.static_range(len(v)):
        folded = folded + (_add_values(acc[i] * alpha, weights[i // PER_GROUP], v[i], TURNED),)
    if _has_zeros(WIDTH, FORM):
        for g in tl.static_range(GROUPS):
            if FORM.zero_point:
                zero = zeros[g].to(tl.float16)
            else:
                zero = tl.full([p.shape[0 if TURNED else 1]], zero_of(FORM), tl.float16)
            equal = tl.zeros([acc[len(v) + g].shape[0 if TURNED else 1]], tl.float16)
            zero = by_row(zero, TURNED) + by_column(equal, TURNED)
            folded = folded + (_add_values(acc[len(v) + g] * alpha, weights[g], zero, TURNED),)
    return folded, unit


@triton.jit
def _add_values(acc, p, v, TURNED: tl.constexpr):
    """acc + p v, where v is [Dv, N] if TURNED and the others are likewise."""
    return add_product(acc, v, p) if TURNED else add_product(acc, p, v)


@triton.jit
def zero_acc(
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr, NUM_WARPS: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """An accumulator for each part, [M, BLOCK] or TURNED, and then one for the zeros' share in each group of parts."""
    acc = ()
    for _ in tl.static_range(parts_of(FORM)):
        acc = acc + (_zero_tile(BLOCK_M, BLOCK, TURNED),)
    if _has_zeros(WIDTH, FORM):
        for _ in tl.static_range(_groups_to_sum(WIDTH, FORM)):
            acc = acc + (_zero_tile(BLOCK_M, (_SUM_ROWS if TURNED else _SUM_COLUMNS) * NUM_WARPS, TURNED),)
    return acc


@triton.jit
def _zero_tile(M: tl.constexpr, N: tl.constexpr, TURNED: tl.constexpr):
    """Zeros, [M, N] or TURNED."""
    return tl.zeros([N, M] if TURNED else [M, N], tl.float32)


@triton.jit
def finish_values(acc, unit, scale_ptr, WIDTH: tl.constexpr, FORM: tl.constexpr, TURNED: tl.constexpr):
    """The parts of acc, with the scales and without the zeros' share that they still have."""
    PARTS: tl.constexpr = parts_of(FORM)
    PER_GROUP: tl.constexpr = PARTS // _groups_to_sum(WIDTH, FORM)
    factor = 1.0
    if _is_scaled_by_key(WIDTH, FORM):
        factor = unit
    elif scale_ptr is not None:
        if FORM.scale == "tensor" or FORM.scale == "head":
            factor = tl.load(scale_ptr)
    finished = ()
    for i in tl.static_range(PARTS):
        x = acc[i]
        if _has_zeros(WIDTH, FORM):
            share = tl.max(acc[PARTS + i // PER_GROUP], 0 if TURNED else 1)
            x = x * factor_of(i, FORM) - by_row(share, TURNED)
        finished = finished + (x * factor,)
    return finished


@triton.jit
def _load_scales(scales, in_n, GROUPS: tl.constexpr, FORM: tl.constexpr):
    """(scales, zero points) of every key, a float32 [N] for each group; () without zero points."""
    by_group, zeros = (), ()
    if FORM.scale == "token":
        by_group = (_load_column(scales, in_n, 0),)
    elif FORM.zero_point:
        for g in tl.static_range(GROUPS):
            scale, zero = _load_pair(scales, in_n, g)
            by_group, zeros = by_group + (scale,), zeros + (zero,)
    else:
        for i in tl.static_range(GROUPS // 2):
            by_group = by_group + _load_pair(scales, in_n, i)
        if GROUPS % 2 == 1:
            by_group = by_group + (_load_column(scales, in_n, GROUPS - 1).to(tl.float32),)
    return by_group, zeros


@triton.jit
def _load_pair(scales, in_n, index):
    """Two float16 values that follow each other; as one word of 32 bits, which a pipeline can take, where it may."""
    if scales[0].dtype.element_ty == tl.int32:
        bits = _load_column(scales, in_n, index)
        first = bits.to(tl.int16).to(tl.float16, bitcast=True)
        second = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        first, second = _load_column(scales, in_n, 2 * index), _load_column(scales, in_n, 2 * index + 1)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _load_column(scales, in_n, index):
    """Entry `index` of every key's scales, [N]; 0 where not in_n (None: all)."""
    ptr, stride, where = scales
    ptr, rows = point_to_rows(ptr, stride, where, 0)
    at = ptr + (rows + index)
    if in_n is None:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=in_n, other=0)
    return x


@triton.jit
def _scale_elements(parts, scales, in_n, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """Parts times their scales, where one lies in several groups; the first parts_of() have words from 0 to BLOCK."""
    ptr, stride, where = scales
    ptr, rows = point_to_rows(ptr, stride, where, 0)
    EACH: tl.constexpr = 2 if FORM.zero_point else 1
    WORDS: tl.constexpr = words_of(WIDTH, FORM)
    scaled = ()
    for i in tl.static_range(len(parts)):
        word = i // parts_of(FORM) * BLOCK + tl.arange(0, parts[i].shape[1])
        group = column_of(word, i % parts_of(FORM), WIDTH, FORM) // FORM.group
        inside = (word < WORDS)[None, :]
        if in_n is not None:
            inside = inside & in_n[:, None]
        at = ptr + (rows[:, None] + (group * EACH)[None, :])
        x = parts[i].to(tl.float32) * factor_of(i % parts_of(FORM), FORM)
        if FORM.zero_point:
            x -= tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
        else:
            x -= zero_of(FORM)
        x *= tl.load(at, mask=inside, other=0.0).to(tl.float32)
        scaled = scaled + (x.to(tl.float16),)
    return scaled
