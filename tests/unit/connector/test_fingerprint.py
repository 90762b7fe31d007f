from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvshuttle.connector import fingerprint as fp
from kvshuttle.connector.step_metadata import WorkerHandshake
from kvshuttle.errors import ConfigError
from kvshuttle.handoff.cards import Fingerprint, Region, WorkerCard

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype=torch.bfloat16)
HF = {"model_type": "llama", "hidden_size": 64, "rope_theta": 1e4, "_name_or_path": "/here", "torch_dtype": "float32"}


@dataclass(frozen=True)
class Engine:
    """What the fingerprint is made of."""

    model: str = "/models/here/tiny"
    hf: dict = None
    cache_dtype: str = "auto"
    spec: object = SPEC
    num_layers: int = 2
    tensor_parallel_size: int = 1
    kv_layout: str = "layout"
    block_len_bytes: int = 100
    identity: str = ""

    def config(self, **parallel):
        return SimpleNamespace(
            model_config=SimpleNamespace(
                model=self.model, hf_config=SimpleNamespace(to_dict=lambda: dict(self.hf or HF))
            ),
            cache_config=SimpleNamespace(cache_dtype=self.cache_dtype),
            parallel_config=SimpleNamespace(
                **{"pipeline_parallel_size": 1, "tensor_parallel_size": self.tensor_parallel_size, **parallel}
            ),
            speculative_config=None,
            kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        )

    def cache(self):
        names = [f"layers.{index}" for index in range(self.num_layers)]
        return KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, self.spec)])

    def handshake(self, rank=0):
        region = Region(1000 + rank, self.block_len_bytes, self.block_len_bytes, 9)
        card = WorkerCard(rank, "here:1", b"", "DRAM", 0, (region,) * self.num_layers)
        return WorkerHandshake(card, self.kv_layout, host_id="here")

    def fingerprint(self):
        ranks = [self.handshake(rank) for rank in range(self.tensor_parallel_size)]
        return fp.fingerprint(self.config(), self.cache(), ranks, model_identity=self.identity)


ENGINE = Engine()
DIFFERENT = {
    "model": [{"model": "/models/here/other"}, {"identity": "fine-tune"}, {"hf": {**HF, "rope_theta": 2e4}}],
    "kv_dtype": [
        {"spec": replace(SPEC, dtype=torch.float16)},
        {"cache_dtype": "fp8_e4m3"},
        {"cache_dtype": "fp8_e5m2"},
    ],
    "block_size_tokens": [{"spec": replace(SPEC, block_size=32)}],
    "num_layers": [{"num_layers": 3}],
    "num_kv_heads": [{"spec": replace(SPEC, num_kv_heads=4)}],
    "head_size": [{"spec": replace(SPEC, head_size=8)}],
    "tensor_parallel_size": [{"tensor_parallel_size": 2}],
    "kv_layout": [{"kv_layout": "other"}],
    "region_len_bytes": [{"block_len_bytes": 200}],
}


@pytest.mark.parametrize(("field", "change"), [(field, change) for field, all_ in DIFFERENT.items() for change in all_])
def test_a_difference_is_named(field, change):
    [difference, *rest] = ENGINE.fingerprint().differences(replace(ENGINE, **change).fingerprint())
    assert difference.startswith(f"{field}: ") or rest
    assert field in {each.split(":")[0] for each in (difference, *rest)}


def test_every_field_but_the_hash_scheme_depends_on_the_engine():
    assert {*DIFFERENT, "chain_scheme"} == set(Fingerprint.__struct_fields__)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/elsewhere/tiny"},
        {"hf": {**HF, "_name_or_path": "/there", "torch_dtype": "bfloat16", "transformers_version": "9"}},
        {"cache_dtype": "bfloat16"},
    ],
    ids=["where the model lies", "who loaded it", "the default said aloud"],
)
def test_what_says_nothing_about_kv_makes_no_difference(change):
    assert ENGINE.fingerprint().differences(replace(ENGINE, **change).fingerprint()) == []


def test_an_identity_makes_equal_what_is_called_differently():
    ours, theirs = (replace(ENGINE, model=name, identity="same") for name in ("/a/one", "/b/two"))
    assert ours.fingerprint() == theirs.fingerprint()


@pytest.mark.parametrize("change", [{"kv_layout": "other"}, {"block_len_bytes": 7}])
def test_ranks_of_one_engine_that_differ_are_refused(change):
    ranks = [ENGINE.handshake(0), replace(ENGINE, **change).handshake(1)]
    with pytest.raises(ConfigError, match="ranks of one engine differ"):
        fp.fingerprint(ENGINE.config(), ENGINE.cache(), ranks, model_identity="")


def groups(*specs):
    return KVCacheConfig(
        num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([f"l{n}"], s) for n, s in enumerate(specs)]
    )


SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=4, dtype=torch.bfloat16, sliding_window=64)


@pytest.mark.parametrize(
    ("parallel", "cache", "message"),
    [
        ({"data_parallel_size": 2}, groups(SPEC), "data_parallel_size: one API server would spread"),
        ({"pipeline_parallel_size": 2}, groups(SPEC), "pipeline_parallel_size: kvshuttle supports 1 only"),
        ({"decode_context_parallel_size": 2}, groups(SPEC), "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, groups(SPEC), "prefill_context_parallel_size"),
        ({}, groups(SPEC, SLIDING), "kv_cache_groups: .* 2 kinds"),
        ({}, groups(), "kv_cache_groups: .* 0 kinds"),
        ({}, groups(SLIDING), "kv_cache_spec: .*SlidingWindowSpec"),
        ({}, groups(replace(SPEC, sliding_window=64)), "sliding_window"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(parallel, cache, message):
    with pytest.raises(ConfigError, match=message):
        fp.check_supported(ENGINE.config(**parallel), cache)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_that_vllm_protects_half_is_refused(role):
    config = ENGINE.config()
    config.kv_transfer_config.kv_role = role
    with pytest.raises(ConfigError, match=f"kv_role: .*{role}"):
        fp.check_supported(config, groups(SPEC))


def test_speculative_decoding_is_refused():
    config = ENGINE.config()
    config.speculative_config = object()
    with pytest.raises(ConfigError, match="speculative_config"):
        fp.check_supported(config, groups(SPEC))


@pytest.mark.parametrize(
    "spec", [SPEC, MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)]
)
def test_full_attention_is_supported(spec):
    fp.check_supported(ENGINE.config(), groups(spec))
