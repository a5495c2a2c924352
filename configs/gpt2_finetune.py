"""Fine-tune a Hugging Face model, or a run of attnlab, on a text.

    attnlab train --config=gpt2_finetune --config.init_from=gpt2 --config.data.path='books/*.txt'
    attnlab sample --workdir=runs/gpt2_finetune

`init_from` is a folder with the `config.json`, `model.safetensors` and tokenizer files of a GPT-2, Llama, Mistral,
Qwen, Gemma, OLMo 2 or Phi-3, or the workdir of a run. If it has no tokenizer, choose one, e.g.
`--config.data.tokenizer=byte`. The model's shape and tokenizer come from there. A longer context is cut to
`config.model.context`. 200 updates of 8,192 tokens, at a twelfth of `gpt2_124m`'s learning rate.
Time and result: not measured on GPT-2's weights.
"""

from attnlab.config import default


def get_config():
    config = default()
    config.data.tokenizer = "pretrained"
    config.update(steps=200, batch_size=32)
    config.model.update(context=256, dropout=0.1)
    config.optimizer.update(learning_rate=5e-5, final_fraction=0.1, warmup_steps=20, accumulation=4)
    config.eval.update(every=50, windows=128)
    config.checkpoint.every = 50
    config.sample.every = 50
    return config
