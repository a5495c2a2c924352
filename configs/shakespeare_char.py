"""A character GPT on 1.1 MB of Shakespeare, the usual small benchmark, at nanoGPT's sizes.

    attnlab train --config=shakespeare_char --config.data.path=tinyshakespeare.txt

The text is `data/tinyshakespeare/input.txt` of the char-rnn repository, 1,115,394 characters; the last tenth is held
out for validation. Time and result: not measured; meant for a GPU.
"""

from attnlab.config import default


def get_config():
    config = default()
    config.data.name = "text"
    config.update(steps=5000, batch_size=64)
    config.model.update(num_layers=6, num_heads=6, width=384, context=256, dropout=0.2)
    config.optimizer.update(learning_rate=2e-3, warmup_steps=200)
    config.eval.every = 250
    return config
