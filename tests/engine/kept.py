"""Modules that stay in 16 bits, by `model_type` of the text model, as published NVFP4 checkpoints have it."""

KEPT: dict[str, tuple[str, ...]] = {
    "qwen3": (),
    "qwen3_moe": ("mlp.gate",),
    "qwen3_next": ("mlp.gate", "mlp.shared_expert_gate", "linear_attn*"),
    # Only the routed experts are NVFP4.
    "qwen4_exp": (
        "mlp.gate",
        "mlp.shared_expert*",
        "linear_attn*",
        "self_attn*",
        "ple*",
        "*hyper_connection*",
    ),
}
