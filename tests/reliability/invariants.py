# SPDX-License-Identifier: Apache-2.0
"""What must hold between any two calls of a scheduler."""

from __future__ import annotations

from tests.reliability.engine import Engine


def check(engine: Engine) -> None:
    """Counters, holders and integrity of pages and tree; cheap enough for every step."""
    pages, size = engine.allocator.pages, engine.size
    assert pages.check_integrity() == []
    assert engine.tree.tree.check_integrity() == []
    assert pages.free + pages.private + pages.evictable + pages.protected == engine.shape.pages

    # SGLang's check while busy: what requests hold beyond what the tree protects for them.
    held = 0
    owned: list[int] = []
    for run in engine.running:
        kv = run.req.kv
        record = engine.allocator.requests[kv.req_pool_idx]
        assert kv.cache_protected_len == record.shared * size
        assert len(record.pages) == -(-kv.kv_allocated_len // size)
        held += len(record.pages) * size - kv.cache_protected_len
        owned += record.pages[record.shared :]
        assert record.mapped >= record.valid
        assert record.row == 0 or record.mapped <= engine.space.pages_per_row
    told = engine.allocator.available_size() + engine.tree.evictable_size() + engine.tree.protected_size()
    assert told + held == engine.shape.pages * size
    assert len(set(owned)) == len(owned) == pages.private, "a page of two requests, or of none"
    assert all(pages.refs(page)[0] for page in owned)

    assert set(engine.allocator.requests) == {run.req.kv.req_pool_idx for run in engine.running}
    assert not engine.allocator.admitted
    assert engine.tree.root_node.lock == len(engine.running)
    assert engine.slots.available_size() == engine.slots.size - len(engine.running)
    ahead = sum(len(record.ahead) for record in engine.allocator.requests.values())
    assert pages.reserved <= ahead, "a reservation that nobody knows of"


def check_rows(engine: Engine) -> None:
    """No row is lost, and none is in two hands."""
    records = engine.allocator.requests.values()
    held = [record.row for record in records if record.row]
    held += [node.row for node in engine.reading.paths.nodes() if node.row]
    held += engine.allocator.rows._released + engine.reading.paths.vanished
    assert len(set(held)) == len(held)
    stats = engine.space.stats()
    assert stats["rows_live"] == len(held)
    assert stats["rows_clean"] + stats["rows_live"] + stats["rows_retired"] == engine.space.num_rows - 1
    if stats["max_mappings"]:
        assert stats["mappings"] <= stats["max_mappings"]


def check_everything(engine: Engine) -> None:
    """The above, every content, and what the operating system says is mapped."""
    check(engine)
    check_rows(engine)
    for run in engine.running:
        engine.check_contents(run)
    engine.model.learn_evictions()
    assert engine.model.tree_hashes() == engine.model.cached
    assert engine.space.check_integrity() == []


def check_end(engine: Engine) -> None:
    """When all have left: nothing is held, everything can be evicted, no row and no mapping is left over."""
    check_everything(engine)
    pages = engine.allocator.pages
    assert pages.private == pages.protected == pages.reserved == 0
    assert engine.allocator.verify_byte_accounting() == []
    engine.tree.evict_pages(engine.shape.pages)
    assert pages.free == engine.shape.pages
    assert engine.tree.tree.num_nodes == engine.tree.tree.num_tokens == 0
    engine.space.clean()
    assert engine.space.drain(30)
    stats = engine.space.stats()
    assert (stats["rows_clean"], stats["mappings"]) == (engine.space.num_rows - 1, 0)
