"""Which test does which example of upstream, and what is left out: the list is whole.

The page is docs/source/api-reference/python/mooncake-store.md of kvcache-ai/Mooncake as of
2026-08-22 (3b5a594), before 0.3.13. A section is named as it is there; sections that only group
others are not listed. A method's heading is its name with ``()``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

from aiomooncake.engine.binding import find_methods
from aiomooncake.engine.methods import BlockingMethods

SECTIONS: Final = {
    "Start Master (with HTTP enabled)": "test_hello_world",
    "Hello World Example": "test_hello_world",
    "P2P Hello World": "test_setup_by_a_dictionary",
    "Simple Get/Put Operations": "test_simple_get_and_put",
    "Structured object write and full read": (
        "test_structured_objects test_a_structured_object_before_set_up"
    ),
    "Structured object transfer policy": "test_structured_objects",
    "Partial reads": "test_structured_objects",
    "Reusing caller-owned destinations": "test_structured_objects",
    "Generic bundle fallback": "test_structured_objects",
    "register_buffer()": "test_buffer_registration",
    "unregister_buffer()": "test_buffer_registration",
    "BufferPool Helper": "test_buffer_pool test_buffer_pool_has_bounds",
    "Complete Zero-Copy Workflow": "test_complete_zero_copy_workflow",
    "put_from()": "test_complete_zero_copy_workflow",
    "get_into()": "test_get_into",
    "get_into_ranges()": (
        "test_ranges_of_one_key test_ranges_of_two_keys_in_two_buffers"
        " test_ranges_that_can_not_be_read"
    ),
    "Class Definition": "test_replicate_config",
    "replica_num": "test_replica_num",
    "nof_replica_num": "test_copies_on_other_media",
    "dfs_replica_num": "test_copies_on_other_media",
    "soft_pin_action": "test_soft_pin_action",
    "with_hard_pin": "test_with_hard_pin",
    "preferred_segment": "test_preferred_segment",
    "prefer_alloc_in_same_node": "test_prefer_alloc_in_same_node test_pub_tensor",
    "group_ids": "test_group_ids",
    "ParallelAxis": "test_axes_and_targets test_layouts_of_several_axes",
    "TensorParallelism": "test_axes_and_targets test_layouts_of_several_axes",
    "ReadTarget": "test_axes_and_targets test_shards_of_one_axis",
    "put_tensor_with_parallelism()": (
        "test_shards_of_one_axis test_a_whole_tensor test_layouts_of_several_axes"
        " test_writer_partitions"
    ),
    "batch_put_tensor_with_parallelism()": (
        "test_batches_of_the_unified_api test_writer_partitions"
    ),
    "get_tensor_with_parallelism()": "test_shards_of_one_axis test_a_whole_tensor",
    "batch_get_tensor_with_parallelism()": "test_batches_of_the_unified_api",
    "get_tensor_with_parallelism_into()": "test_the_unified_api_in_registered_memory",
    "batch_get_tensor_with_parallelism_into()": "test_the_unified_api_in_registered_memory",
    "upsert_tensor_with_parallelism()": "test_batches_of_the_unified_api",
    "batch_upsert_tensor_with_parallelism()": "test_batches_of_the_unified_api",
    "put_tensor_with_parallelism_from()": "test_the_unified_api_in_registered_memory",
    "batch_put_tensor_with_parallelism_from()": "test_the_unified_api_in_registered_memory",
    "upsert_tensor_with_parallelism_from()": "test_the_unified_api_in_registered_memory",
    "batch_upsert_tensor_with_parallelism_from()": "test_the_unified_api_in_registered_memory",
    "Basic Operations": "test_basic_operations_by_blocking_calls",
    "get_buffer Buffer Protocol": "test_get_buffer",
    "Constructor": "test_setup_by_a_dictionary",
    "setup()": "test_setup_by_a_dictionary test_the_store_lives_its_own_life",
    "setup_dummy()": (
        "test_the_store_lives_its_own_life test_setup_dummy test_tensors_of_dummy_clients"
        " test_what_dummy_clients_do_not_have"
    ),
    "put()": "test_put",
    "get()": "test_get",
    "put_batch()": "test_put_batch",
    "upsert()": "test_upsert",
    "upsert_from()": "test_upsert_from",
    "batch_upsert_from()": "test_upsert_from",
    "upsert_parts()": "test_upsert_parts",
    "upsert_batch()": "test_upsert_batch",
    "get_batch()": "test_get_batch",
    "remove()": "test_remove",
    "remove_by_regex()": "test_remove_by_regex",
    "remove_all()": "test_remove_all test_failures_without_a_master",
    "batch_remove()": "test_batch_remove",
    "is_exist()": "test_is_exist test_failures_without_a_master",
    "batch_is_exist()": "test_batch_is_exist test_failures_without_a_master",
    "get_size()": "test_get_size",
    "get_buffer()": "test_get_buffer",
    "put_parts()": "test_put_parts",
    "batch_get_buffer()": "test_batch_get_buffer",
    "alloc_from_mem_pool()": "test_alloc_from_mem_pool test_setup_dummy",
    "init_all()": "test_the_store_lives_its_own_life",
    "mount_segment()": "test_mount_segment",
    "unmount_segment()": "test_mount_segment",
    "allocate_and_mount_segment()": "test_allocate_and_mount_segment",
    "unmount_and_free_segment()": "test_allocate_and_mount_segment",
    "get_hostname()": "test_get_hostname",
    "get_replica_desc()": "test_replica_descriptors",
    "batch_get_replica_desc()": "test_replica_descriptors",
    "create_copy_task()": "test_copy_tasks test_tasks_that_are_refused",
    "create_move_task()": "test_move_tasks test_tasks_that_are_refused",
    "query_task()": "test_tasks_that_are_refused test_copy_tasks",
    "close()": "test_the_store_lives_its_own_life test_setup_by_a_dictionary",
    "put_from_with_metadata()": "test_put_from_with_metadata",
    "pub_tensor()": "test_pub_tensor",
    "put_tensor_with_tp()": "test_put_tensor_with_tp",
    "pub_tensor_with_tp()": "test_batches_with_tp",
    "get_tensor_with_tp()": "test_put_tensor_with_tp",
    "batch_put_tensor_with_tp()": "test_batches_with_tp",
    "batch_pub_tensor_with_tp()": "test_batches_with_tp",
    "batch_get_tensor_with_tp()": "test_batches_with_tp",
    "put_tensor()": "test_put_and_get_tensor",
    "get_tensor()": "test_put_and_get_tensor",
    "batch_get_tensor()": "test_batch_get_tensor",
    "batch_put_tensor()": "test_batch_get_tensor",
    "batch_pub_tensor()": "test_pub_tensor",
    "upsert_tensor()": "test_upsert_tensor",
    "upsert_tensor_from()": "test_put_tensor_from",
    "batch_upsert_tensor_from()": "test_put_tensor_from",
    "batch_upsert_tensor()": "test_upsert_tensor",
    "upsert_pub_tensor()": "test_upsert_tensor",
    "batch_upsert_pub_tensor()": "test_upsert_tensor",
    "get_tensor_into()": "test_get_tensor_into",
    "batch_get_tensor_into()": "test_get_tensor_into",
    "get_tensor_with_tp_into()": "test_get_tensor_with_tp_into",
    "batch_get_tensor_with_tp_into()": "test_get_tensor_with_tp_into",
    "put_tensor_from()": "test_put_tensor_from",
    "batch_put_tensor_from()": "test_put_tensor_from",
    "put_tensor_with_tp_from()": "test_put_tensor_with_tp_from",
    "batch_put_tensor_with_tp_from()": "test_put_tensor_with_tp_from",
    "batch_put_from()": "test_batch_put_from_and_get_into",
    "batch_get_into()": "test_batch_put_from_and_get_into",
    "batch_put_from_multi_buffers()": "test_multi_buffers",
    "batch_get_into_multi_buffers()": "test_multi_buffers",
    "batch_get_session_start()": "test_sessions",
    "batch_get_into_multi_buffer_ranges()": "test_sessions test_sessions_that_are_refused",
    "batch_get_session_end()": "test_sessions",
    "batch_put_session_start()": "test_sessions test_sessions_that_are_refused",
    "batch_put_from_multi_buffer_ranges()": "test_sessions",
    "batch_put_session_end()": "test_sessions test_sessions_that_are_refused",
    "batch_put_session_revoke()": "test_sessions_that_are_refused",
    "MooncakeHostMemAllocator": "test_host_memory_allocator",
    "bind_to_numa_node": "test_bind_to_numa_node",
    "Error Handling": "test_error_handling",
    "Performance Tips": "test_performance_tips",
    # Not on the page, but in upstream's tests of the wheel:
    "batch_replica_clear()": "test_batch_replica_clear",
    "save_tensor_to_safetensor()": "test_safetensors",
    "load_tensor_from_safetensor()": "test_safetensors",
    "health_check()": "test_what_a_client_tells_of_itself",
    "get_offload_rpc_read_count()": "test_what_a_client_tells_of_itself",
    "unmount_local_disk_segment()": "test_what_a_client_tells_of_itself",
    "test_put_get_tensor.py": "test_tensors_without_elements",
    "test_multi_dummy_clients.py": "test_clients_that_share_keys",
}
"""The tests of each section, or of each file of upstream's tests that has more."""

LEFT_OUT: Final = {
    "PyPI Package": "a command; docs/start.md has ours",
    "Required Service": "prose",
    "Main types": "imports, which the sections after it use",
    "Performance Notes": "prose",
    "Compatibility wrappers": "prose; the wrappers have sections of their own",
    "Topology & Devices": "needs RDMA devices",
    "get_tensor_into_cuda()": "needs CUDA, and is not on the page",
    "batch_get_tensor_into_cuda()": "needs CUDA, and is not on the page",
    # Files of upstream that are examples or tests in Python:
    "mooncake-store/tests/distributed_object_store_provider.py": "a module that no wheel has",
    "mooncake-store/tests/stress_cluster_benchmark.py": "a benchmark",
    "mooncake-store/tests/e2e/session_ranges_tcp_e2e.py": "the page's example of sessions",
    "mooncake-store/tests/e2e/store_client_e2e.py": "needs an NVMe-over-Fabrics pool",
    "mooncake-wheel/tests/test_batch_replica_clear.py": "test_upstream_undocumented.py",
    "mooncake-wheel/tests/test_buffer_pool_native.py": "the page's BufferPool Helper, further",
    "mooncake-wheel/tests/test_distributed_object_store.py": "the page's examples, further",
    "mooncake-wheel/tests/test_distributed_object_store_cxl.py": "needs CXL memory",
    "mooncake-wheel/tests/test_dummy_client.py": "the page's examples by a dummy client; CUDA",
    "mooncake-wheel/tests/test_mooncake_store_service_api.py": "REST: tests/gateway",
    "mooncake-wheel/tests/test_offload_on_eviction.py": "needs a disk tier",
    "mooncake-wheel/tests/test_promotion_on_hit.py": "needs a disk tier",
    "mooncake-wheel/tests/test_replicated_distributed_object_store.py": "the page's, with copies",
    "mooncake-wheel/tests/test_safetensor_functions.py": "test_upstream_undocumented.py",
    "mooncake-wheel/tests/test_ssd_offload_in_evict.py": "needs a disk tier",
    "mooncake-wheel/tests/test_structured_object_store.py": "a helper of upstream's own, further",
    "mooncake-wheel/tests/test_dataproto_catalog.py": "a helper of upstream's own",
    "mooncake-wheel/tests/test_transfer_on_cuda.py": "needs CUDA",
    "mooncake-wheel/tests/test_transfer_on_hip.py": "needs ROCm",
}
"""Why a section, a method or a file has no test here."""

THIS: Final = Path(__file__)
PAGE: Final = THIS.parents[3] / "docs" / "from-the-binding.md"


def sources() -> dict[str, str]:
    """Read the text of every test of this folder, by its name."""
    found: dict[str, str] = {}
    for path in {*THIS.parent.glob("test_upstream_*.py")} - {THIS}:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.name not in found or not node.name.startswith("test_")
                found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return {name: text for name, text in found.items() if name.startswith("test_")}


def test_every_test_has_a_section_and_every_section_a_test() -> None:
    named = {name for names in SECTIONS.values() for name in names.split()}
    assert named == set(sources())
    assert not set(SECTIONS) & set(LEFT_OUT)


def test_the_tests_of_a_method_call_it() -> None:
    texts = sources()
    for section, names in SECTIONS.items():
        method, brackets, _ = section.partition("()")
        if brackets:
            calls = re.compile(rf"\.{method}\b")
            assert any(calls.search(texts[name]) for name in names.split()), section


def test_every_method_of_the_wheel_has_a_section() -> None:
    listed = {section.removesuffix("()") for section in (*SECTIONS, *LEFT_OUT) if "()" in section}
    assert listed == find_methods(BlockingMethods)


def test_every_method_of_the_wheel_is_on_our_page() -> None:
    """And each in one row of its table only."""
    _, table = PAGE.read_text(encoding="utf-8").split("## Every method")
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(find_methods(BlockingMethods))
