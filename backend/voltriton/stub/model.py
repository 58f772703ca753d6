"""TritonPythonModel of the backend `vllm`: hands over, nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from voltriton import settings
from voltriton.errors import InvalidArgument, VoltritonError
from voltriton.processes import end_with
from voltriton.stub.contract import declare
from voltriton.stub.front import Front
from voltriton.stub.link import Launch, host_environment
from voltriton.stub.metrics import ENGINE_UP, Metrics, NoMetrics


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Adds the contract's tensors that the file does not declare; batching and decoupling are not its to choose."""
        declare(auto_complete_model_config)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        end_with(os.getppid(), os.getpid())
        try:
            self._front = make_front(args)
            self._front.start()
        except VoltritonError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def is_ready(self) -> bool:
        """Asked by Triton 26.03 and newer; older ones cannot know that an engine is down."""
        return self._front.ready

    def finalize(self) -> None:
        self._front.stop()


def make_front(args: dict[str, str]) -> Front:
    """From what Triton gives to `initialize`. InvalidArgument where files or placement are at fault."""
    config = json.loads(args["model_config"])
    version = Path(args["model_repository"]).absolute() / args["model_version"]
    model = settings.load(version)
    check_placement(config, model.engine_args)
    launch = Launch(
        python=model.settings.python
        or os.environ.get("VOLTRITON_PYTHON")
        or shutil.which("python3")
        or "python3",
        env=host_environment({**device(args), **model.env}),
        hello={"version_folder": str(version), "model_name": args["model_name"]},
        start_timeout_s=model.settings.start_timeout_s,
        stop_timeout_s=model.settings.stop_timeout_s,
        max_restarts=model.settings.max_restarts,
        silent_timeout_s=model.settings.silent_timeout_s,
        restart_pause_s=model.settings.restart_pause_s,
    )
    return Front(model, launch, make_metrics(config, args), pb_utils)


def check_placement(config: dict[str, Any], engine_args: dict[str, Any]) -> None:
    """Instance groups: one instance, and KIND_GPU only for an engine on one GPU (the official rule and words)."""
    for group in config["instance_group"]:
        if int(group["count"]) != 1:
            raise InvalidArgument(
                f"instance_group.count: got {group['count']}, 1 is allowed: one engine serves all requests, "
                "and several would share the same devices"
            )
        width = 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = engine_args.get(name, 1)
            settings.check_type(value, int, f"model.json: {name}")
            width *= value
        if group["kind"] == "KIND_GPU" and width > 1:
            raise InvalidArgument(
                "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's "
                f"config.pbtxt for multi-GPU models (got {width} ranks)"
            )


def device(args: dict[str, str]) -> dict[str, str]:
    """KIND_GPU binds the engine to the instance's GPU."""
    if args["model_instance_kind"] == "GPU":
        return {"CUDA_VISIBLE_DEVICES": args["model_instance_device_id"]}
    return {}


def make_metrics(config: dict[str, Any], args: dict[str, str]) -> Metrics:
    """On unless REPORT_CUSTOM_METRICS says false; the server may have metrics switched off."""
    asked = config.get("parameters", {}).get("REPORT_CUSTOM_METRICS", {}).get("string_value", "true")
    if asked.lower() == "false":
        pb_utils.Logger.log_info("[vllm] metrics are off: REPORT_CUSTOM_METRICS is false in config.pbtxt")
        return NoMetrics()
    metrics = Metrics(pb_utils, args["model_name"], args["model_version"])
    try:
        metrics.gauge(ENGINE_UP, 0.0)
    except Exception as error:
        pb_utils.Logger.log_warn(f"[vllm] metrics are off: {error}")
        return NoMetrics()
    return metrics
