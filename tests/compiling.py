"""Compiles the kernels for GPUs that are not there, and reads what the compiler made of them."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_decoding.backends.triton.append import _WARPS, _append_kernel, choose_rows
from flash_decoding.backends.triton.chunk import _chunk_kernel, is_turned
from flash_decoding.backends.triton.codes import words_of
from flash_decoding.backends.triton.exchange import _exchange_kernel, block_of_words
from flash_decoding.backends.triton.reduce import SLICE, _reduce_kernel, block_of_splits, block_of_states
from flash_decoding.split_plan import Tile, next_power_of_2

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Compiled:
    """Resources of one program, and the assembly."""

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    ptx: str


def compile_chunk(
    dtype,
    group,
    head_dim,
    value_dim,
    tile: Tile,
    arch,
    *,
    split=True,
    masked=False,
    page_size=None,
    q_len=1,
    options=False,
    ragged=False,
    kv_format=None,
    fixed=True,
    prefetch=False,
) -> Compiled:
    """The chunk kernel as an aligned call compiles it; masked: with lengths, starts, a key mask; options: with all."""
    forms = (None, None) if kv_format is None else (kv_format.k, kv_format.v)
    k_scale, v_scale = ("constexpr" if form is None else "*i32" if form.group else "*fp32" for form in forms)
    k, v = (f"*{NAMES[dtype]}" if form is None else "*i16" for form in forms)
    x, stride = f"*{NAMES[dtype]}", ("i32", "i32", "i32")
    k_width, v_width = words_of(head_dim, forms[0]), words_of(value_dim, forms[1])
    partial = "*fp32" if split else "constexpr"
    lens = "*i32" if masked or page_size or ragged else "constexpr"
    signature = {
        "q_ptr": x, "q_stride": stride, "k_ptr": k, "k_stride": stride, "v_ptr": v,
        "v_stride": "constexpr" if k_width == v_width else stride,
        "k_scale_ptr": k_scale, "k_scale_stride": stride, "v_scale_ptr": v_scale, "v_scale_stride": stride,
        "block_table_ptr": "*i32" if page_size else "constexpr", "block_table_step": "i32",
        "kv_lens_ptr": lens, "kv_start_ptr": "*i32" if masked else "constexpr",
        "q_lens_ptr": "*i32" if options else "constexpr",
        "key_mask_ptr": "*i1" if masked else "constexpr", "key_mask_step_b": "i32", "key_mask_step_n": "i32",
        "tree_mask_ptr": "*i1" if options else "constexpr", "tree_step_b": "i32", "tree_step_t": "i32",
        "tree_step_n": "i32", "alibi_ptr": "*fp32" if options else "constexpr",
        "sinks_ptr": "*fp32" if options and not split else "constexpr",
        "out_ptr": x, "out_stride": stride, "lse_ptr": "constexpr" if split else "*fp32",
        "acc_ptr": partial, "m_ptr": partial, "l_ptr": partial,
        "scale": "fp32", "softcap": "fp32" if options else "constexpr", "window": "i32" if options else "constexpr",
        "kv_len": "i32", "B": "i32", "Hkv": "i32", "num_splits": "i32", "split_size": "constexpr",
        "at_once": "i32" if ragged else "constexpr",
    }  # fmt: skip
    constants = {
        "G": group, "Lq": q_len, "D": head_dim, "DV": value_dim, "CAUSAL": True, "PAGE_SIZE": page_size,
        "K_FORM": forms[0], "V_FORM": forms[1], "FP8_CONVERT": arch >= 89,
        "V_IN_K": head_dim > 256 and tile.block_d == tile.block_dv == value_dim,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": tile.block_d, "REST_D": tile.rest_d,
        "BLOCK_DV": tile.block_dv, "NUM_WARPS": tile.num_warps,
        "TURNED": is_turned(tile, dtype),
        "K_STEP": k_width if fixed else 0, "V_STEP": v_width if fixed else 0,
        "EARLY_REDUCE": split and arch >= 90,
        "PREFETCH": prefetch,
    }  # fmt: skip
    return _compile(_chunk_kernel, signature, constants, arch, tile.num_warps, tile.num_stages)


def compile_reduce(
    dtype, value_dim, block_s, num_warps, arch, *, skip_empty=False, ragged=False, shared=False, block_dv=None,
    is_last=True,
) -> Compiled:  # fmt: skip
    """The reduce kernel likewise; ragged: pieces, shared: a shared prefix's splits besides; not is_last: a state."""
    lens = "*i32" if ragged or shared else "constexpr"
    signature = {
        "acc_ptr": "*fp32", "m_ptr": "*fp32", "l_ptr": "*fp32", "out_ptr": f"*{NAMES[dtype]}",
        "out_stride": ("i32", "i32", "i32"), "lse_ptr": "*fp32", "sinks_ptr": "*fp32", "kv_lens_ptr": lens,
        "q_lens_ptr": lens, "kv_start_ptr": "*i32" if ragged else "constexpr",
        **dict.fromkeys(("kv_len", "B", "Hq", "rows", "num_splits"), "i32"),
        **dict.fromkeys(("shared_at", "shared_splits", "shared_rows", "shared_len"), "i32" if shared else "constexpr"),
    }  # fmt: skip
    constants = {
        "G": 4, "Lq": 1, "BLOCK_M": 16, "IN_PIECES": ragged, "SKIP_EMPTY": skip_empty, "DV": value_dim,
        "BLOCK_S": block_s, "BLOCK_DV": block_dv or min(SLICE, next_power_of_2(value_dim)), "EARLY": arch >= 90,
        "EARLY_NEXT": arch >= 90 and not is_last,
    }  # fmt: skip
    if not is_last:
        signature["l_out_ptr"] = "*fp32"
    return _compile(_reduce_kernel, signature, constants, arch, num_warps, 1)


def compile_partials(dtype, width, count, arch, *, is_last) -> Compiled:
    """The reduce kernel as it merges partials of several calls, into one more where it is not the last."""
    block_s, num_warps = block_of_splits(count)
    signature = {
        **dict.fromkeys(("acc_ptr", "m_ptr", "l_ptr", "lse_ptr"), "*fp32"), "out_ptr": f"*{NAMES[dtype]}",
        "out_stride": ("i32", "i32", "i32"), "acc_step": "i32",
        **dict.fromkeys(("sinks_ptr",) if is_last else ("l_out_ptr",), "*fp32"),
        **dict.fromkeys(("kv_len", "B", "Hq", "rows", "num_splits"), "i32"),
    }  # fmt: skip
    constants = {
        "G": 1, "Lq": 1, "BLOCK_M": 1, "SKIP_EMPTY": True, "DV": width, "BLOCK_S": block_s, "BLOCK_DV": SLICE,
    }  # fmt: skip
    return _compile(_reduce_kernel, signature, constants, arch, num_warps, 1)


def compile_exchange(dtype, width, ranks, arch, *, scatter=False) -> Compiled:
    """The exchange kernel, for one query row per program."""
    block_r, block_dv, num_warps = block_of_words(ranks, width)
    signature = {
        **dict.fromkeys(("acc_ptr", "m_ptr", "l_ptr", "lse_ptr", "sinks_ptr"), "*fp32"), "addresses_ptr": "*i64",
        "half": "i32", "counters_ptr": "*i32", "out_ptr": f"*{NAMES[dtype]}", "out_stride": ("i32", "i32", "i32"),
        **dict.fromkeys(("rank", "rows", "heads", "Hq", "timeout_ms", "signature"), "i32"),
    }  # fmt: skip
    constants = {
        "Lq": 1, "RANKS": ranks, "SCATTER": scatter, "DV": width, "BLOCK_R": block_r, "BLOCK_DV": block_dv,
        "COUNTERS": 1024, "COUNTERS_EACH": 32, "EARLY": arch >= 90,
    }  # fmt: skip
    return _compile(_exchange_kernel, signature, constants, arch, num_warps, 1)


def compile_merge(dtype, width, count, arch) -> Compiled:
    """The reduce kernel as merge_states() starts it."""
    block_s, block_dv, num_warps = block_of_states(count, width)
    signature = {
        "acc_ptr": f"*{NAMES[dtype]}", "m_ptr": "*fp32", "out_ptr": f"*{NAMES[dtype]}", "lse_ptr": "*fp32",
        "out_stride": ("i32", "i32", "i32"), "acc_step": "i64",
        **dict.fromkeys(("kv_len", "B", "Hq", "rows", "num_splits"), "i32"),
    }  # fmt: skip
    constants = {
        "G": 1, "Lq": 1, "BLOCK_M": 1, "SKIP_EMPTY": True, "NATURAL": True, "DV": width,
        "BLOCK_S": block_s, "BLOCK_DV": block_dv,
    }  # fmt: skip
    return _compile(_reduce_kernel, signature, constants, arch, num_warps, 1)


def compile_append(
    dtype, head_dim, arch, *, value_dim=None, page_size=None, rotary=None, rotary_dim=None, queries=False,
    new_lens=True, kv_format=None,
) -> Compiled:  # fmt: skip
    """The append kernel likewise; rotary: "halves" or "interleaved"."""
    x, table = f"*{NAMES[dtype]}", "*fp32" if rotary else "constexpr"
    value_dim = value_dim or head_dim
    block_r, block_d = choose_rows(head_dim, value_dim)
    integers = (
        "block_table_step", "cos_step", "sin_step", "L", "Lq", "Hkv", "Hq", "capacity", "pages", "positions", "q_step",
        "tiles",
    )  # fmt: skip
    signature = dict.fromkeys(integers, "i32")
    for name in ("k_new", "v_new", "k", "v", "q", "q_out"):
        is_there = queries or not name.startswith("q")
        signature |= {f"{name}_ptr": x if is_there else "constexpr", f"{name}_stride": ("i32",) * 3}
    signature |= {"kv_lens_ptr": "*i32", "new_lens_ptr": "*i32" if new_lens else "constexpr"}
    signature |= {"cos_ptr": table, "sin_ptr": table, "block_table_ptr": "*i32" if page_size else "constexpr"}
    constants = {
        "D": head_dim, "DV": value_dim, "ROTARY_DIM": (rotary_dim or head_dim) if rotary else 0,
        "INTERLEAVED": rotary == "interleaved", "PAGE_SIZE": page_size, "BLOCK_R": block_r, "BLOCK_D": block_d,
    }  # fmt: skip
    sides = (None, None) if kv_format is None else (kv_format.k, kv_format.v)
    for name, form, width in zip("kv", sides, (head_dim, value_dim), strict=True):
        signature[f"{name}_scale_stride"] = ("i32",) * 4
        part = (form.group or width) if form and form.scale in ("token", "group") else None
        constants |= {f"{name.upper()}_FORM": form, f"{name.upper()}_PART": part}
        if form is not None:
            signature |= {f"{name}_ptr": "*u8", f"{name}_scale_ptr": "*fp16" if form.group else "*fp32"}
    return _compile(_append_kernel, signature, constants, arch, _WARPS, 1)


def _compile(kernel, signature, constants, arch, num_warps, num_stages) -> Compiled:
    built = build(kernel, signature, constants, arch, num_warps, num_stages)
    return Compiled(*_resources(built.asm["cubin"]), built.metadata.shared, built.asm["ptx"])


def build(kernel, signature, constants, arch, num_warps=4, num_stages=1):
    """What Triton compiles; a name without a type is None, and (name, i) among the constants an element of a tuple."""
    order = kernel.arg_names
    signature = {name: signature.get(name, "constexpr") for name in order}
    paths = {name: (name,) if isinstance(name, str) else name for name in constants}
    constexprs = {(order.index(path[0]), *path[1:]): constants[name] for name, path in paths.items()}
    for i, name in enumerate(order):
        if signature[name] == "constexpr" and (i,) not in constexprs:
            constexprs[(i,)] = None
    aligned = [["tt.divisibility", 16]]
    attrs = {}
    for i, name in enumerate(order):
        if isinstance(signature[name], tuple):
            attrs.update({(i, j): aligned for j in range(len(signature[name]))})
        elif signature[name].startswith("*"):
            attrs[(i,)] = aligned
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, spilled bytes, stack bytes) of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    text = usage.stdout + usage.stderr
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump printed no resources: {text}"
    return int(found[1]), len(re.findall(r"\b(?:LDL|STL)\b", sass)), int(found[2])
