"""GPT-2's smallest model: 12 layers, 12 heads, width 768, context 1,024; 124 million parameters, bfloat16.

    hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include 'sample/10BT/*' --local-dir fineweb
    attnlab train --config=gpt2_124m --config.data.path='fineweb/sample/10BT/*.parquet'

The files are 10 billion tokens of English web pages (Penedo et al. 2024, arXiv 2406.17557); any other text will do.
If they cannot be downloaded, `--config.data.mixture='quijote=4, python_docs=1'` is a 2.6 MB text for trials.

Sizes, batch and schedule are those with which nanoGPT reproduces GPT-2: half a million tokens per update, 600,000
updates. The tokenizer is a byte-level BPE with up to 50,257 tokens like GPT-2's, but its merges are learned from this
text. The model pads the vocabulary to 50,304, a multiple of 128.

Memory on an H100: 22.1 GiB, according to `attnlab plan --config=gpt2_124m --topology=h100` (JAX 0.12). Time: 16
sequences took 36.8 ms there (docs/benchmarks.md), so all updates would take 7.7 days.
Neither the loss nor a run of more than a few seconds has been measured. One step with a tiny batch runs on a CPU:

    … --config.steps=1 --config.batch_size=1 --config.optimizer.accumulation=1 --config.eval.windows=1
"""

from attnlab.config import default


def get_config():
    config = default()
    config.data.name = "text"
    config.data.update(tokenizer="bpe", vocab_size=50257)
    config.steps = 600_000
    config.batch_size = 480
    config.precision = "bfloat16"
    config.model.update(num_layers=12, num_heads=12, width=768, context=1024, vocab_size=50304)
    config.model.update(positions="learned", use_bias=False)
    config.model.attention.qk_norm = False
    config.optimizer.update(learning_rate=6e-4, final_fraction=0.1, warmup_steps=2000, b2=0.95, accumulation=5)
    config.eval.update(every=1000, windows=512)
    config.checkpoint.every = 1000
    return config
