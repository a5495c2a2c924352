"""TransformerLens' activation patching, run by any Python that has transformer-lens; imports nothing of attnlab.

    python transformerlens.py

A worker process: see `serving.py`, beside this file, for the protocol.
"""

import os
import sys

if __name__ == "__main__":
    from serving import serve

    del sys.path[0]  # this file's folder, whose module names would shadow others
    os.environ["HF_HUB_OFFLINE"] = "1"

import time

import numpy as np


class TransformerLens:
    """A GPT-2 on two prompts.

    Args:
      folder: a Hugging Face GPT-2.
      prompts: path of a `.npy` file, int `[2, T]`: the clean prompt, and the corrupt one.
      answers: two tokens, whose difference of logits at the last position is the metric.
    """

    def __init__(self, folder, prompts, answers):
        import torch
        from transformer_lens.model_bridge import TransformerBridge
        from transformers import GPT2LMHeadModel

        loaded = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
        self.model = TransformerBridge.boot_transformers(folder, hf_model=loaded, device="cpu")
        self.model.eval()
        self.clean, self.corrupt = torch.from_numpy(np.load(prompts).astype(np.int64))[:, None]
        self.right, self.wrong = answers

    def _metric(self, logits):
        return logits[0, -1, self.right] - logits[0, -1, self.wrong]

    def patch(self):
        """The metric with each head's z of the clean run, `[L, H]`; a forward pass for each."""
        import torch
        from transformer_lens import patching

        start = time.perf_counter()
        with torch.inference_mode():
            _, cache = self.model.run_with_cache(self.clean, names_filter=lambda name: name.endswith("hook_z"))
            found = patching.get_act_patch_attn_head_out_all_pos(self.model, self.corrupt, cache, self._metric)
        return {"seconds": time.perf_counter() - start, "values": found.tolist()}


if __name__ == "__main__":
    serve(TransformerLens)
