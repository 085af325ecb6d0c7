"""OpenVINO GenAI's continuous batching on the CPU. options: model, scheduler, properties."""

from __future__ import annotations

from peers.adapters.child import main
from peers.job import Item, Job


class OpenVino:
    def __init__(self, job: Job) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        for name, value in job.options["scheduler"].items():
            setattr(scheduler, name, value)
        properties = {"INFERENCE_NUM_THREADS": job.threads, **job.options["properties"]}
        self._pipeline = genai.ContinuousBatchingPipeline(
            job.options["model"], scheduler, "CPU", properties
        )

    def run(self, items: list[Item]) -> list[list[int]]:
        import numpy as np
        import openvino
        import openvino_genai as genai

        prompts, configs = [], []
        for item in items:
            prompts.append(openvino.Tensor(np.array([item.prompt], dtype=np.int64)))
            config = genai.GenerationConfig()
            config.max_new_tokens = item.output
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        done = self._pipeline.generate(prompts, configs)
        return [list(result.m_generation_ids[0]) for result in done]

    def close(self) -> None:
        del self._pipeline


if __name__ == "__main__":
    main(OpenVino)
