"""Servers that the tests of this folder share: starting one takes seconds."""

from __future__ import annotations

import pytest
from serving import Server, assert_nothing_is_left, read_events, save_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served") / "toy")


@pytest.fixture(scope="session")
def adapter(directory, tmp_path_factory):
    """A folder of peft with an adapter that changes what the model writes."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapted") / "tuned"
    get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server(directory, adapter):
    """A server of a model and an adapter, with small limits; two signals end it in the midst of a stream."""
    limits = (
        "--queue",
        64,
        "--connections",
        200,
        "--tokens",
        1900,
        "--body-mib",
        1,
        "--request-seconds",
        120,
    )
    server = Server(directory, "--model", f"tuned={adapter}", "--memory", 0.02, *limits)
    yield server
    long = {"model": "toy", "prompt": "a", "max_tokens": 1800, "ignore_eos": True}
    with server.open_stream(long) as stream:
        read_events(stream, b"data: ")
        workers = server.workers()
        assert len(workers) == 2
        assert_nothing_is_left(server, workers, server.stop())
        assert server.process.returncode == 0
