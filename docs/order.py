"""Members of the Python reference in the order in which they are used, of classes where that of the
source is another: made, used, looked at, ended.
"""

ENDPOINT = "poll wait ended has_ended fileno step failure forget abort"
LAST = "leases snapshot drain draining drained close drop abandon machine"
ORDER = {
    "disagg.PrefillEndpoint": f"send reject {ENDPOINT} refusals {LAST}",
    "disagg.DecodeEndpoint": "connect handshake receive decline layer_ready wait_layer reading "
    f"{ENDPOINT} aux num_tokens metrics disconnect {LAST}",
    "disagg.TransferPlan": "bind bind_all explain contributors contributes needs_count between "
    "parts layer_routes cast",
    "kvpool.Allocator": "new_request extend extend_batch locations store truncate truncate_batch "
    "fork free usage free_pages free_items check_unshared check_integrity",
    "kvpool.KVPool": "from_budget write read read_roles view item_bytes_view stacked scatter "
    "gather copy_items save load bytes_per_token get_contiguous_buf_infos get_state_buf_infos "
    "kv_buf_groups kv_buf_group_sizes space_of spaces declare check_integrity",
    "kvpool.PoolLayout": "of merge explain live_bytes space_of regions_in slabs share by_blocks "
    "covers fingerprint to_json from_json to_msgpack from_msgpack items_by_space items_by_list "
    "items_per_block packed_spaces block_pools adjacent_buffers",
}
"""By the name that a page of the reference has for a class."""
