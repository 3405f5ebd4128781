"""Imported once, before processes are forked: what a first compilation loads and sets up.

With one thread and on the CPU, so that there is nothing running that a fork would lose.
"""

import torch
import torch._inductor.config

torch.set_num_threads(1)
torch._inductor.config.compile_threads = 1
with torch.no_grad():
    torch.compile(lambda x: x.exp().sum(-1), dynamic=True)(torch.ones(2, 2))
