import pytest
import torch

from kvshuttle.connector.kv_layout import kv_memory, plan_spans
from kvshuttle.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvshuttle.handoff.block_plan import BlockPlan, BlockRun
from kvshuttle.handoff.cards import Region

BLOCKS, HEADS, TOKENS, CONTENT = 12, 2, 16, 8
PAGE = HEADS * TOKENS * CONTENT * 4


def cache(*shape, order=None):
    """A float32 tensor of ``shape`` whose dimensions lie in memory in ``order``, outermost first."""
    order = tuple(range(len(shape))) if order is None else order
    stored = torch.zeros([shape[dim] for dim in order])
    return stored.permute(*[order.index(dim) for dim in range(len(shape))])


def layers(*tensors):
    return {f"model.layers.{index}.self_attn.attn": tensor for index, tensor in enumerate(tensors)}


def read_block(region, block):
    """The bytes of one block, by the region's arithmetic."""
    assert 0 <= block < region.num_blocks
    return region.base_address + block * region.block_stride_bytes


def test_one_layer_is_one_region_of_dense_blocks():
    tensor = cache(BLOCKS, HEADS, TOKENS, CONTENT)
    memory = kv_memory(layers(tensor), num_blocks=BLOCKS)
    assert memory.regions == (Region(tensor.data_ptr(), PAGE, PAGE, BLOCKS),)
    assert memory.storage_spans.tolist() == [[tensor.data_ptr(), BLOCKS * PAGE]]
    assert (memory.device, memory.device_id) == ("DRAM", 0)
    assert read_block(memory.regions[0], 5) == tensor[5].data_ptr()


def test_the_order_of_a_pages_content_is_part_of_the_layout():
    by_head = kv_memory(layers(cache(BLOCKS, HEADS, TOKENS, CONTENT)), num_blocks=BLOCKS)
    by_token = kv_memory(layers(cache(BLOCKS, HEADS, TOKENS, CONTENT, order=(0, 2, 1, 3))), num_blocks=BLOCKS)
    assert by_head.regions[0].block_len_bytes == by_token.regions[0].block_len_bytes
    assert by_head.layout != by_token.layout


def test_layers_that_share_one_storage_block_by_block_have_strides():
    storage = torch.zeros(BLOCKS, 3, HEADS, TOKENS, CONTENT)
    tensors = [storage[:, layer] for layer in range(3)]
    memory = kv_memory(layers(*tensors), num_blocks=BLOCKS)
    assert [region.block_stride_bytes for region in memory.regions] == [3 * PAGE] * 3
    assert [read_block(memory.regions[layer], 4) for layer in range(3)] == [t[4].data_ptr() for t in tensors]
    assert memory.storage_spans.tolist() == [[storage.data_ptr(), 3 * BLOCKS * PAGE]]


def test_k_and_v_apart_are_two_regions_of_a_layer():
    tensor = torch.zeros(2, BLOCKS, TOKENS, HEADS, CONTENT)
    memory = kv_memory(layers(tensor), num_blocks=BLOCKS)
    assert [read_block(region, 7) for region in memory.regions] == [tensor[0, 7].data_ptr(), tensor[1, 7].data_ptr()]
    other_pool = torch.zeros(2, BLOCKS + 5, TOKENS, HEADS, CONTENT)
    assert kv_memory(layers(other_pool), num_blocks=BLOCKS + 5).layout == memory.layout


def test_a_block_that_the_kernel_splits_into_pages_is_one_run():
    tensor = cache(BLOCKS * 4, HEADS, TOKENS // 4, CONTENT)
    [region] = kv_memory(layers(tensor), num_blocks=BLOCKS).regions
    assert (region.block_len_bytes, region.num_blocks) == (PAGE, BLOCKS)
    assert read_block(region, 3) == tensor[12].data_ptr()


def test_mla_has_one_latent_a_token():
    tensor = torch.zeros(BLOCKS, TOKENS, 576)
    [region] = kv_memory(layers(tensor), num_blocks=BLOCKS).regions
    assert region.block_len_bytes == TOKENS * 576 * 4


def test_layers_that_share_a_cache_are_registered_once():
    tensor = cache(BLOCKS, HEADS, TOKENS, CONTENT)
    memory = kv_memory(layers(tensor, tensor, cache(BLOCKS, HEADS, TOKENS, CONTENT)), num_blocks=BLOCKS)
    assert len(memory.regions) == 2


def test_layers_are_in_their_natural_order_whatever_the_dictionary_says():
    tensors = [cache(BLOCKS, HEADS, TOKENS, CONTENT) for _ in range(11)]
    named = layers(*tensors)
    shuffled = dict(sorted(named.items(), key=lambda item: item[0][::-1]))
    assert list(shuffled) != list(named)
    regions = kv_memory(shuffled, num_blocks=BLOCKS).regions
    assert [region.base_address for region in regions] == [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("num_blocks", [TOKENS, HEADS + 1, 2 * CONTENT, 100])
def test_the_layout_does_not_depend_on_the_number_of_blocks(num_blocks):
    ours = kv_memory(layers(cache(BLOCKS, HEADS, TOKENS, CONTENT)), num_blocks=BLOCKS)
    theirs = kv_memory(layers(cache(num_blocks, HEADS, TOKENS, CONTENT)), num_blocks=num_blocks)
    assert ours.layout == theirs.layout


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (cache(BLOCKS, HEADS, TOKENS, CONTENT, order=(1, 0, 2, 3)), "not one run of bytes"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT)[..., :CONTENT], "not one run of bytes"),
        (torch.zeros(1, 1, 1, 1).expand(BLOCKS, HEADS, TOKENS, CONTENT), "not one run of bytes"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), "do not divide"),
        (torch.zeros(BLOCKS // 2, HEADS, TOKENS, CONTENT), "do not divide"),
        (torch.zeros(4 * BLOCKS, 2, HEADS, TOKENS, CONTENT)[:, 0], "not one run of bytes"),
    ],
    ids=["heads outermost", "gaps", "overlap", "odd count", "too few", "split pages with gaps"],
)
def test_a_layout_whose_blocks_are_not_runs_is_refused_by_name(tensor, message):
    with pytest.raises(ConfigError, match=rf"kv_caches\['model.layers.0.self_attn.attn'\].*{message}"):
        kv_memory(layers(tensor), num_blocks=BLOCKS)


def test_no_cache_at_all_is_refused():
    with pytest.raises(ConfigError, match="no KV cache"):
        kv_memory({}, num_blocks=BLOCKS)


def test_caches_on_several_devices_are_refused():
    with pytest.raises(ConfigError, match="others on"):
        kv_memory(layers(torch.zeros(BLOCKS, 4), torch.zeros(BLOCKS, 4, device="meta")), num_blocks=BLOCKS)


DENSE = (Region(1000, 10, 10, 50), Region(5000, 10, 10, 50))
STRIDED = (Region(1000, 10, 30, 50), Region(1010, 10, 30, 50))
PLAN = BlockPlan(0, 4, (BlockRun(3, 20, 3), BlockRun(9, 5, 1)))


def test_runs_of_dense_blocks_are_one_span_a_region():
    source, destination = plan_spans(PLAN, DENSE, DENSE)
    assert source.tolist() == [[1030, 30], [1090, 10], [5030, 30], [5090, 10]]
    assert destination.tolist() == [[1200, 30], [1050, 10], [5200, 30], [5050, 10]]


@pytest.mark.parametrize(("source", "destination"), [(STRIDED, DENSE), (DENSE, STRIDED), (STRIDED, STRIDED)])
def test_runs_are_cut_into_blocks_where_a_side_is_not_dense(source, destination):
    ours, theirs = plan_spans(PLAN, source, destination)
    assert len(ours) == len(theirs) == 2 * 4
    assert ours[:, 1].tolist() == theirs[:, 1].tolist() == [10] * 8
    assert ours[:4, 0].tolist() == [source[0].base_address + b * source[0].block_stride_bytes for b in (3, 4, 5, 9)]
    assert theirs[:4, 0].tolist() == [
        destination[0].base_address + b * destination[0].block_stride_bytes for b in (20, 21, 22, 5)
    ]


def test_regions_that_do_not_match_are_the_peers_fault():
    with pytest.raises(RemoteProtocolError, match="2 regions, not our 1"):
        plan_spans(PLAN, DENSE, DENSE[:1])


@pytest.mark.parametrize("run", [BlockRun(50, 1, 1), BlockRun(49, 1, 2)])
def test_a_source_block_beyond_the_end_is_the_peers_fault(run):
    with pytest.raises(RemoteProtocolError, match="beyond the end"):
        plan_spans(BlockPlan(0, run.num_blocks, (run,)), DENSE, DENSE)


def test_a_destination_block_beyond_the_end_is_ours():
    with pytest.raises(LocalProtocolError, match="beyond the end"):
        plan_spans(BlockPlan(0, 1, (BlockRun(1, 50, 1),)), DENSE, DENSE)
