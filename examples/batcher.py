"""A continuous batcher: chunked prefill, prefix reuse, preemption. See docs/run-models.md."""

from collections import deque
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpool import Allocator, OutOfPages, PrefixCache, Request, Saved
from kvpool.integrations.transformers import PoolCache, pool_for

ROWS, PAGE, CHUNK, ANSWER = 4, 16, 32, 40  # requests at a time; tokens: a page, prefill, answers
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512, "initializer_range": 0.2}
SIZES |= {"num_hidden_layers": 6, "num_attention_heads": 4, "pad_token_id": 0}


@dataclass(eq=False)
class Job:
    tokens: list[int]  # the prompt, then what was generated; all but the last are in the pool
    end: int  # tokens when it is done
    request: Request = field(init=False)  # while it runs
    saved: Saved | None = None  # its state on the host, after it was preempted


class Batcher:
    def __init__(self, model: str, pages: int) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model, **SIZES)
        self.model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        self.model.eval().requires_grad_(False)
        sizes = {"num_pages": pages, "requests": 2 * ROWS, "chunk_tokens": CHUNK}
        self.pool = pool_for(config, page_size=PAGE, dtype="f32", **sizes)
        self.allocator = Allocator(self.pool, prefix=PrefixCache(checkpoint_tokens=CHUNK))
        self.waiting, self.running, self.done = deque[Job](), list[Job](), list[list[int]]()

    def step(self) -> None:
        """Admits jobs whose tokens fit, and computes a token of each that runs."""
        while self.waiting and len(self.running) < ROWS:
            if self.allocator.free_pages * PAGE <= len(self.waiting[0].tokens):
                break
            job = self.waiting.popleft()
            job.request, prompt = self.allocator.new_request(job.tokens[:-1]), len(job.tokens)
            start = job.request.num_tokens  # of a stored prefix, which others may share
            if job.saved is not None:  # it was preempted: what follows comes back from the host
                self.allocator.extend(job.request, prompt - 1 - start, received=True)
                self.pool.load(job.request.address(), job.saved, start=start)
                self.allocator.store(job.request, job.tokens[start:-1])
                job.saved = None
            while job.request.num_tokens < prompt:
                self.forward([job])
            self.running.append(job)
        try:
            self.forward(self.running)
        except OutOfPages:  # nothing was changed: all rows get their tokens, or none
            job = self.running.pop()  # the youngest goes on later
            job.saved = self.pool.save(job.request.address())
            self.allocator.free(job.request)  # its stored pages are reused until taken
            self.waiting.appendleft(job)
        for job in [job for job in self.running if len(job.tokens) >= job.end]:
            self.running.remove(job)
            self.allocator.free(job.request)
            self.done.append(job.tokens)

    def forward(self, jobs: list[Job]) -> None:
        """Computes the tokens that are not in the pool, up to the next multiple of CHUNK."""
        cached = [job.request.num_tokens for job in jobs]
        ids = torch.tensor([job.tokens[n : n - n % CHUNK + CHUNK] for job, n in zip(jobs, cached)])
        padding = [max(cached) - n for n in cached]  # rows end in one column
        cache = PoolCache(self.pool, self.allocator, [job.request for job in jobs], padding)
        logits = self.model(ids, past_key_values=cache, **cache.inputs(ids.shape[1])).logits
        for job, new, row in zip(jobs, ids.tolist(), logits):
            self.allocator.store(job.request, new)  # they are written: others may reuse them
            if job.request.num_tokens == len(job.tokens):
                job.tokens.append(int(row[-1].argmax()))


def main(model: str = "llama", pages: int = 16) -> None:
    batcher = Batcher(model, pages)
    prompts = ([*range(100, 148), *torch.randint(512, (n,)).tolist()] for n in range(1, 40, 5))
    batcher.waiting.extend(Job(prompt, len(prompt) + ANSWER) for prompt in prompts)
    while batcher.waiting or batcher.running:
        batcher.step()
    for tokens in batcher.done:
        alone = batcher.model(torch.tensor([tokens])).logits[0, -ANSWER - 1 : -1].argmax(-1)
        assert tokens[-ANSWER:] == alone.tolist()  # in one pass, without the pool
    print(f"{len(batcher.done)} done, each as by the model alone, {batcher.allocator.usage()}")


if __name__ == "__main__":
    main()
