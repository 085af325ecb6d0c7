"""`octavo bench embeddings`: embeddings per second, beside transformers."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict, replace
from typing import Any

from octavo.core.config import ConfigError, EngineConfig, prepare_thread_environment
from octavo.core.entry.cli.bench_options import add_record_options, count, watched
from octavo.core.entry.cli.options import add_engine_options, engine_config


def add_parser(kinds: Any) -> None:
    """The command's options."""
    parser = kinds.add_parser(
        "embeddings",
        help="embeddings per second, beside transformers one at a time and in padded batches",
        description="Embeds pieces of English text, here and by transformers in the same run.",
        allow_abbrev=False,
    )
    bench = parser.add_argument_group("benchmark")
    bench.add_argument("--texts", type=count, default=128, metavar="N", help="texts (128)")
    bench.add_argument(
        "--repeats", type=count, default=2, metavar="N", help="runs, of which the best counts (2)"
    )
    bench.add_argument(
        "--random-bert",
        action="store_true",
        help="instead of MODEL, an encoder of BERT-base's size with random weights",
    )
    add_record_options(bench)
    add_engine_options(parser)


def run(options: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        ConfigError: the model embeds nothing, or transformers is missing.
    """
    prepare_thread_environment()
    config = engine_config(options)
    try:
        import transformers  # noqa: F401  # what is missing is told before anything is loaded
    except ImportError as error:
        raise ConfigError(
            f"octavo bench embeddings needs transformers ({error}): pip install 'octavo[hf]'"
        ) from error
    from octavo.core.entry.bench import embeddings

    with contextlib.ExitStack() as stack:
        if options.random_bert:
            folder = stack.enter_context(embeddings.random_bert())
            config = replace(config, model=str(folder))
        _measure(options, config)


def _measure(options: argparse.Namespace, config: EngineConfig) -> None:
    from octavo.core.entry.bench import embeddings
    from octavo.core.entry.bench.reference_model import load_transformers
    from octavo.core.entry.front import load_front, load_progress
    from octavo.core.entry.wiring import build_engine

    progress = load_progress(config)
    front = load_front(config, progress)
    assert front.files is not None
    engine = build_engine(config, files=front.files, progress=progress)
    try:
        if engine.info.embedding is None:
            raise ConfigError(f"{config.model}: {engine.info.not_a_task}")
        if options.random_bert:
            from transformers import BertModel

            model: Any = BertModel.from_pretrained(front.files.path, add_pooling_layer=False).eval()
        else:
            model = load_transformers(front.files).base_model
        ids = embeddings.texts(
            lambda text: front.tokenizer.encode(text, add_special_tokens=False), options.texts
        )
        with watched(options, config) as record:
            rates, difference = embeddings.measure(engine, model, ids, options.repeats)
            values = {"rates": [asdict(rate) for rate in rates], "difference": difference}
            record(values, engine.info)
    finally:
        engine.shutdown()
    info = engine.info.embedding
    print(
        f"{engine.info.architecture} ({engine.info.numbers}), {len(ids)} texts of "
        f"{sum(map(len, ids)) / len(ids):.0f} tokens on average, {info.pooling} pooling\n"
    )
    print(embeddings.table(rates))
    print(f"\nlargest difference of a number to transformers: {difference:.1e}")
