"""The tensors of a state dict of `transformers`, and the parameters of a `GPT` in each."""

from collections.abc import Iterator

from attnlab.interop.huggingface import mixer_tensors
from attnlab.interop.huggingface.families import Family
from attnlab.interop.huggingface.mixer_tensors import linear
from attnlab.interop.tensors import Tensor
from attnlab.nn import GPT, DifferentialAttention, LatentAttention
from attnlab.nn.kinds import Attention, kind_of, named, norm_at_of
from attnlab.nn.resolved import resolved

# The names of norms, by `GPT.norm_at`.
_NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def gpt2(model: GPT, prefix: str = "transformer.", transposed: bool = False) -> list[Tensor]:
    """The tensors of GPT-2; with `transposed`, kernels are `[out, in]`, as in torch's Linear and nanoGPT."""
    width, hidden = model.width, resolved(model).hidden
    attention_bias, qkv_bias = resolved(model)[3:]
    tensors = [
        Tensor(f"{prefix}wte.weight", (model.vocab_size, width), ("embed/embedding",)),
        Tensor(f"{prefix}wpe.weight", (model.context, width), ("positions/embedding",)),
    ]

    def norm(name, path):
        yield Tensor(f"{name}.weight", (width,), (f"{path}/scale",))
        if model.use_bias:
            yield Tensor(f"{name}.bias", (width,), (f"{path}/bias",))

    def projection(name, rows, columns, paths, use_bias=model.use_bias):
        shape = (columns, rows) if transposed else (rows, columns)
        yield Tensor(f"{name}.weight", shape, tuple(f"{path}/kernel" for path in paths), transposed)
        if use_bias:
            yield Tensor(f"{name}.bias", (columns,), tuple(f"{path}/bias" for path in paths))

    for layer in range(model.num_layers):
        name, block = f"{prefix}h.{layer}", f"block_{layer}"
        projections = [f"{block}/attention/{which}" for which in ("query", "key", "value")]
        tensors += norm(f"{name}.ln_1", f"{block}/attention_norm")
        tensors += projection(f"{name}.attn.c_attn", width, 3 * width, projections, qkv_bias)
        tensors += projection(f"{name}.attn.c_proj", width, width, [f"{block}/attention/out"], attention_bias)
        tensors += norm(f"{name}.ln_2", f"{block}/mlp_norm")
        tensors += projection(f"{name}.mlp.c_fc", width, hidden, [f"{block}/mlp/up"])
        tensors += projection(f"{name}.mlp.c_proj", hidden, width, [f"{block}/mlp/down"])
    return [*tensors, *norm(f"{prefix}ln_f", "final_norm"), *_output(model)]


def decoder(model: GPT, family: Family, prefix: str = "model.", interleaved: bool = False) -> list[Tensor]:
    """The tensors of Llama and similar families; `interleaved` if rotary positions rotate pairs of neighbours."""

    def renamed(part):
        return family.names.get(part, part)

    def norm(name, path):
        return Tensor(f"{name}.weight", (model.width,), (f"{path}/scale",))

    embed = f"{prefix}{renamed('embed_tokens')}.weight"
    tensors = [Tensor(embed, (model.vocab_size, model.width), ("embed/embedding",))]
    for layer in range(model.num_layers):
        name, block = f"{prefix}layers.{layer}", f"block_{layer}"
        kind, norms = named(kind_of(model, layer)), _NORMS[norm_at_of(model, layer)]
        part = "self_attn" if isinstance(kind, Attention) else family.recurrent.name
        names = f"{name}.{part}", f"{block}/attention"
        if kind.layer is DifferentialAttention:
            tensors += mixer_tensors.differential(kind.module(model), model.width, *names)
        elif kind.layer is LatentAttention:
            tensors += mixer_tensors.latent(kind.module(model), model.width, *names, interleaved=interleaved)
        elif isinstance(kind, Attention):
            tensors += _attention(model, *names, family.fused)
        else:
            tensors += family.recurrent.tensors(kind.module(model), model.width, *names)
        if model.mlp_ratio:
            tensors += _mlp(model, f"{name}.{renamed('mlp')}", f"{block}/mlp", family.fused)
        places = [place for place in norms if model.mlp_ratio or not place.startswith("mlp")]
        tensors += [norm(f"{name}.{renamed(norms[place])}", f"{block}/{place}") for place in places]
    return [*tensors, norm(f"{prefix}{renamed('norm')}", "final_norm"), *_output(model)]


def _attention(model: GPT, name: str, path: str, fused: bool) -> Iterator[Tensor]:
    head_dim, kv_heads, _, out_bias, qkv_bias = resolved(model)
    sizes = {"query": model.num_heads * head_dim, "key": kv_heads * head_dim, "value": kv_heads * head_dim}
    if fused:
        paths = [f"{path}/{which}" for which in sizes]
        yield from linear(f"{name}.qkv_proj", model.width, sum(sizes.values()), *paths, bias=qkv_bias)
    else:
        for which, columns in sizes.items():
            gated = model.output_gate and which == "query"
            paths, groups = [f"{path}/{which}"] + [f"{path}/gate"] * gated, model.num_heads if gated else 1
            size = columns * len(paths)
            yield from linear(f"{name}.{which[0]}_proj", model.width, size, *paths, bias=qkv_bias, groups=groups)
    yield from linear(f"{name}.o_proj", sizes["query"], model.width, f"{path}/out", bias=out_bias)
    if model.qk_norm:
        for which in ("query", "key"):
            size = sizes[which] if model.qk_norm_joint else head_dim
            yield Tensor(f"{name}.{which[0]}_norm.weight", (size,), (f"{path}/{which}_ln/scale",))


def _mlp(model: GPT, name: str, path: str, fused: bool) -> Iterator[Tensor]:
    width, hidden = model.width, resolved(model).hidden
    if fused:
        yield from linear(f"{name}.gate_up_proj", width, 2 * hidden, f"{path}/gate", f"{path}/up", bias=model.use_bias)
    else:
        for which in ("gate", "up"):
            yield from linear(f"{name}.{which}_proj", width, hidden, f"{path}/{which}", bias=model.use_bias)
    yield from linear(f"{name}.down_proj", hidden, width, f"{path}/down", bias=model.use_bias)


def _output(model: GPT) -> Iterator[Tensor]:
    if not model.tie_embeddings:
        yield Tensor("lm_head.weight", (model.vocab_size, model.width), ("output/embedding",))
