"""Fine-tunes a GPT-2 of Hugging Face, or a run of attnlab, on a text.

    python -m attnlab.train --config=configs/gpt2_finetune.py --config.init_from=gpt2 --config.data.path='books/*.txt'
    python -m attnlab.sample --workdir=runs/gpt2_finetune

`init_from` is a folder with `config.json`, `model.safetensors` and tokenizer files, as any GPT-2 on the hub has them
(gpt2, gpt2-medium, …), or the workdir of a run; without a tokenizer there, name one by `--config.data.tokenizer=byte`.
Shape and tokenizer come from there, so that the sizes below, GPT-2's smallest, are not used; a longer context than
`config.model.context` is cut. 200 updates of 8,192 tokens at a twelfth of the rate that pretraining takes.
Result and time: not measured on GPT-2's weights.
"""

from attnlab.config import default


def get_config():
    config = default()
    config.data.tokenizer = "pretrained"
    config.steps = 200
    config.batch_size = 32
    config.model.update(num_layers=12, num_heads=12, width=768, context=256, dropout=0.1)
    config.model.update(positions="learned", qk_norm=False, use_bias=True)
    config.optimizer.update(learning_rate=5e-5, final_fraction=0.1, warmup_steps=20, accumulation=4)
    config.eval.update(every=50, windows=128)
    config.checkpoint.every = 50
    config.sample.every = 50
    return config
