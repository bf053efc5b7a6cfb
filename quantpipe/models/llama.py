"""The Llama family: Llama, SmolLM and Mistral (without its sliding window)."""

from dataclasses import dataclass

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import eos_token_ids, require_value, required_int, rope_spec
from quantpipe.models.description import (
    AttentionSpec,
    DecoderDescription,
    LayerDescription,
    LinearSpec,
    MlpSpec,
    NormSpec,
)

# What transformers assumes where a config.json leaves these out.
DEFAULT_NORM_EPS = 1e-6
MISTRAL_DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class Biases:
    """Which linears of a layer have one."""

    query_key_value: bool
    output: bool
    mlp: bool


def describe_llama(artifact: Artifact) -> DecoderDescription:
    """The decoder that config.json declares. ArtifactError where a field asks for what this runtime does not do."""
    config = artifact.config
    attention_bias = bool(config.get("attention_bias", False))
    default_window = MISTRAL_DEFAULT_WINDOW if config["model_type"] == "mistral" else None
    window = config.get("sliding_window", default_window)
    return describe_decoder(
        artifact, Biases(attention_bias, attention_bias, mlp=bool(config.get("mlp_bias", False))), window
    )


def describe_decoder(artifact: Artifact, biases: Biases, window: int | None) -> DecoderDescription:
    """A decoder in Llama's form with these biases, whose attention may be limited to a ``window`` of tokens."""
    config = artifact.config
    require_value(artifact, "hidden_act", config.get("hidden_act", "silu"), "silu")
    max_position_embeddings = required_int(artifact, "max_position_embeddings")
    _refuse_window(artifact, window, max_position_embeddings)
    hidden_size, num_heads = required_int(artifact, "hidden_size"), required_int(artifact, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    eps = config.get("rms_norm_eps", DEFAULT_NORM_EPS)
    vocab_size = required_int(artifact, "vocab_size")
    is_head_tied = bool(config.get("tie_word_embeddings", False))
    lm_head = LinearSpec("lm_head", vocab_size, hidden_size, False, artifact.scheme_of("lm_head"))
    if is_head_tied and lm_head.scheme is not None:
        raise ArtifactError(
            f"{artifact.folder}/config.json: tie_word_embeddings is true, yet lm_head is stored quantized; "
            "an artifact with a quantized lm_head stores both tensors and says false"
        )
    layers = tuple(
        _describe_layer(artifact, f"model.layers.{index}", hidden_size, num_heads, head_dim, eps, biases)
        for index in range(required_int(artifact, "num_hidden_layers"))
    )
    return DecoderDescription(
        family=str(config["model_type"]),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_token_ids(artifact),
        embedding_name="model.embed_tokens.weight",
        rope=rope_spec(artifact, head_dim),
        layers=layers,
        final_norm=NormSpec("model.norm", eps),
        lm_head=lm_head,
        is_head_tied=is_head_tied,
    )


def _describe_layer(
    artifact: Artifact, prefix: str, hidden_size: int, num_heads: int, head_dim: int, eps: float, biases: Biases
) -> LayerDescription:
    num_kv_heads = artifact.config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ArtifactError(
            f"{artifact.folder}/config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    intermediate_size = required_int(artifact, "intermediate_size")

    def linear(name: str, out_features: int, in_features: int, has_bias: bool) -> LinearSpec:
        full_name = f"{prefix}.{name}"
        return LinearSpec(full_name, out_features, in_features, has_bias, artifact.scheme_of(full_name))

    query_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    return LayerDescription(
        attention_norm=NormSpec(f"{prefix}.input_layernorm", eps),
        attention=AttentionSpec(
            query=linear("self_attn.q_proj", query_size, hidden_size, biases.query_key_value),
            key=linear("self_attn.k_proj", kv_size, hidden_size, biases.query_key_value),
            value=linear("self_attn.v_proj", kv_size, hidden_size, biases.query_key_value),
            output=linear("self_attn.o_proj", hidden_size, query_size, biases.output),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            softmax_scale=head_dim**-0.5,
        ),
        mlp_norm=NormSpec(f"{prefix}.post_attention_layernorm", eps),
        mlp=MlpSpec(
            gate=linear("mlp.gate_proj", intermediate_size, hidden_size, biases.mlp),
            up=linear("mlp.up_proj", intermediate_size, hidden_size, biases.mlp),
            down=linear("mlp.down_proj", hidden_size, intermediate_size, biases.mlp),
        ),
    )


def _refuse_window(artifact: Artifact, window: int | None, max_position_embeddings: int) -> None:
    """A window that no context can outgrow changes nothing; any other is refused."""
    if window is not None and window < max_position_embeddings:
        raise ArtifactError(
            f"{artifact.folder}/config.json: sliding_window {window} is not supported by this runtime; "
            "serve a model whose sliding_window is null"
        )
