"""Loads the modules that a first compilation needs, before processes are forked.

It compiles with one thread, because a fork has no other threads.
"""

import torch
import torch._inductor.config

torch.set_num_threads(1)
torch._inductor.config.compile_threads = 1
with torch.no_grad():
    torch.compile(lambda x: x.exp().sum(-1), dynamic=True)(torch.ones(2, 2))
