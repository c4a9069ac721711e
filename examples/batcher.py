"""A continuous batcher with prefix reuse, preemption and hand-off: see docs/run-models.md."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections import deque
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from kvpool import Allocator, OutOfPages, PrefixCache, Request, Saved
from kvpool.integrations.transformers import PoolCache, pool_for

ROWS, PAGE, CHUNK, ANSWER = 4, 16, 32, 40  # requests at a time; tokens: a page, prefill, answers
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 512}
SIZES |= {"num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0}


@dataclass(eq=False)
class Job:
    name: int
    tokens: list[int]  # the prompt, then what was generated; all but the last are in the pool
    end: int  # tokens when it is done
    request: Request | None = None
    saved: Saved | None = None


class Batcher:
    def __init__(self, options):
        torch.set_num_threads(1)  # small models in two processes are faster so
        torch.manual_seed(0)  # the same weights in both
        config = AutoConfig.for_model(options.model, **SIZES)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.model = model.eval().requires_grad_(False)
        sizes = {"num_pages": options.pages, "requests": 2 * ROWS, "chunk_tokens": CHUNK}
        self.pool = pool_for(config, page_size=PAGE, dtype="f32", **sizes)
        self.allocator = Allocator(self.pool, prefix=PrefixCache(checkpoint_tokens=CHUNK))
        self.waiting, self.running, self.done, self.preempted = deque(), [], {}, 0

    def step(self):
        """Admits jobs, and decodes a token of each that runs."""
        while self.waiting and len(self.running) < ROWS:
            if self.allocator.free_pages * PAGE <= len(self.waiting[0].tokens):
                break  # its prompt does not fit now
            job = self.waiting.popleft()
            self.resume(job) if job.saved else self.begin(job)
            self.running.append(job)
        while self.running:
            try:
                self.forward(self.running)
                break
            except OutOfPages:  # nothing was changed: all rows get their tokens, or none
                job = self.running.pop()  # the youngest goes to host memory
                job.saved = self.pool.save(job.request.address())
                self.allocator.free(job.request)
                self.waiting.appendleft(job)
                self.preempted += 1
        for job in [job for job in self.running if len(job.tokens) >= job.end]:
            self.running.remove(job)
            self.allocator.free(job.request)  # its pages can be reused until they are taken
            self.done[job.name] = job.tokens

    def begin(self, job):
        """Computes the prompt after the prefix that is there."""
        job.request, prompt = self.allocator.new_request(job.tokens[:-1]), len(job.tokens)
        while job.request.num_tokens < prompt:
            self.forward([job])

    def forward(self, jobs):
        """Computes the tokens that are not in the pool, up to the next multiple of CHUNK."""
        held = [job.request.num_tokens for job in jobs]
        new = [job.tokens[n : n - n % CHUNK + CHUNK] for job, n in zip(jobs, held)]
        padding = [max(held) - n for n in held]  # rows end in one column
        cache = PoolCache(self.pool, self.allocator, [job.request for job in jobs], padding)
        inputs = cache.inputs(len(new[0]))  # mask and positions
        logits = self.model(torch.tensor(new), past_key_values=cache, **inputs).logits
        for job, ids, row in zip(jobs, new, logits):
            self.allocator.store(job.request, ids)  # they are written: others may reuse them
            if job.request.num_tokens == len(job.tokens):
                job.tokens.append(int(row[-1].argmax()))

    def resume(self, job):
        job.request = self.allocator.new_request()
        self.allocator.extend(job.request, job.saved.num_tokens, received=True)
        self.pool.load(job.request.address(), job.saved)
        self.allocator.store(job.request, job.tokens[:-1])
        job.saved = None


class Decoder(Batcher):
    def begin(self, job):
        """Receives the state that the other process has; of a prefix that is there, nothing."""
        job.request = self.allocator.new_request(job.tokens[:-2])
        known, room = job.request.num_tokens, str(job.name)
        self.allocator.extend(job.request, len(job.tokens) - 1 - known, received=True)
        self.endpoint.receive(room, job.request.address(), start=known)
        assert self.endpoint.wait(room, 60) is KVPoll.Success, self.endpoint.failure(room)
        self.allocator.store(job.request, job.tokens[known:-1])


def decode(options, address, pipe):
    """The second process: jobs come through the pipe, None after the last."""
    batcher, more = Decoder(options), True
    with DecodeEndpoint(batcher.pool.layout, create_engine("local")) as batcher.endpoint:
        batcher.endpoint.connect([address], timeout=60)
        while more or batcher.waiting or batcher.running:
            while more and pipe.poll(0 if batcher.waiting or batcher.running else None):
                more = pipe.recv()
                batcher.waiting.extend([more] if more else [])
            batcher.step()
    pipe.send((batcher.done, batcher.preempted, batcher.allocator.usage()))


def main(arguments=None):
    parser = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="llama", help="a model type of transformers")
    parser.add_argument("--requests", type=int, default=12, help="how many to serve")
    parser.add_argument("--pages", type=int, default=16, help="of each process, 9 or more")
    options = parser.parse_args(arguments)
    batcher, away, spawn = Batcher(options), {}, get_context("spawn")
    system, tails = torch.randint(512, (48,)), torch.randint(1, 40, (options.requests,))
    for name, tail in enumerate(tails):
        prompt = torch.cat([system, torch.randint(512, (tail,))]).tolist()
        batcher.waiting.append(Job(name, prompt, len(prompt) + ANSWER))
    pipe, theirs = spawn.Pipe()
    with PrefillEndpoint(batcher.pool.layout, create_engine("local")) as endpoint:
        spawn.Process(target=decode, args=(options, endpoint.address, theirs), daemon=True).start()
        theirs.close()
        while away or batcher.waiting or batcher.running:
            batcher.step()
            for job in [job for job in batcher.running if job.name % 3 == 0]:
                batcher.running.remove(job)
                pipe.send(Job(job.name, job.tokens, job.end))
                endpoint.send(str(job.name), job.request.address())
                away[str(job.name)] = job.request
            for ended in endpoint.ended():  # only now may the pages be taken
                batcher.allocator.free(away.pop(ended.room))
            print(f"\r{len(batcher.done)} done, {len(batcher.waiting)} wait ", end="", flush=True)
        pipe.send(None)
        both = (batcher.done, batcher.preempted, batcher.allocator.usage()), pipe.recv()
    print()
    for place, (done, preempted, usage) in zip(("here", "there"), both):
        print(f"{place}: {len(done)} done, {preempted} preempted, {usage.prefix}")
    return both


if __name__ == "__main__":
    main()
