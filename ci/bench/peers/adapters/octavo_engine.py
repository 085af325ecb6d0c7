"""Octavo, by its offline API. options: model, and flags as `octavo generate` takes them."""

from __future__ import annotations

import argparse
from typing import NoReturn

from peers.adapters.child import Refused, main
from peers.job import Item, Job


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


class Octavo:
    def __init__(self, job: Job) -> None:
        from octavo.core.config import ConfigError, prepare_thread_environment
        from octavo.core.entry.cli.options import add_engine_options, engine_config

        prepare_thread_environment()
        parser = _Parser(allow_abbrev=False)
        add_engine_options(parser)
        options = job.options
        arguments = [options["model"], "--threads", str(job.threads), "--no-load-progress"]
        try:
            config = engine_config(parser.parse_args([*arguments, *options["flags"]]))
            from octavo.core.entry.llm import LLM

            self._llm = LLM.from_config(config)
        except ConfigError as error:
            raise Refused(str(error)) from error
        info = self._llm.info
        self.notes = {"device": str(info.device), "dtype": str(info.dtype)}

    def run(self, items: list[Item]) -> list[list[int]]:
        from octavo.core.params import SamplingParams

        done = self._llm.generate(
            [item.prompt for item in items],
            [
                SamplingParams(temperature=0.0, max_tokens=item.output, ignore_eos=True)
                for item in items
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in done]

    def close(self) -> None:
        self._llm.shutdown()


if __name__ == "__main__":
    main(Octavo)
