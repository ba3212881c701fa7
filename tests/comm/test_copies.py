"""Copies between GPUs, on stand-ins for them: no slot too early, pieces, who may not take part, deadlines, closing."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
from stand_in_devices import Ranks

from contrastile.comm import copies, staging
from contrastile.comm.copies import SETTING
from contrastile.comm.staging import SLOTS
from contrastile.comm.watch import Silence, Watch, Word, until

PIECE, LEAST = 1000, 64
READY, PULLED = range(2)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE", PIECE)
    monkeypatch.setattr(copies, "LEAST", LEAST)
    monkeypatch.delenv(SETTING, raising=False)


def sizes(step: int, n: int) -> Any:
    """How many bytes each rank sends each other at a step: nothing, a few, one piece, several and not quite one."""
    draw = random.Random(step)
    return [
        [draw.choice([0, 3, LEAST, PIECE - 1, PIECE, 2 * PIECE + 7, 5 * PIECE]) for _ in range(n)] for _ in range(n)
    ]


def content(step: int, source: int, target: int, size: int) -> Any:
    return np.random.default_rng([step, source, target]).integers(0, 256, size, dtype=np.uint8)


def parts(step: int, rank: int, n: int) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    """What a rank sends at a step, where it receives, and what is to arrive: two arrays for each other rank."""
    many = sizes(step, n)
    outgoing, incoming, expected = {}, {}, {}
    for r in range(n):
        if r != rank and many[rank][r]:
            x = content(step, rank, r, many[rank][r])
            outgoing[r] = [x[: x.size // 3], x[x.size // 3 :]]
        if r != rank and many[r][rank]:
            size = many[r][rank]
            expected[r] = content(step, r, rank, size)
            y = np.zeros(size, dtype=np.uint8)
            incoming[r] = [y[: size // 3], y[size // 3 :]]
    return outgoing, incoming, expected


def wrong(ranks: Ranks, steps: int, *, deaf: tuple[int, int] | None = None, backwards: bool = False) -> int:
    """How many messages arrive with other bytes than were sent, of many that no host waits for."""

    def program(rank: int, channel: Any) -> int:
        assert channel.prepare(LEAST)
        if deaf is not None and deaf[0] == rank:
            ranks.devices[rank].deaf = deaf[1]
        sent = []
        for step in range(steps):
            outgoing, incoming, expected = parts(step, rank, ranks.size)
            pending = channel.post(outgoing, incoming, step, lambda: 20.0) if outgoing or incoming else None
            sent.append((pending, outgoing, incoming, expected))
        for pending, *_ in sent[:: -1 if backwards else 1]:
            if pending is not None:
                pending.wait()
        ranks.finish(rank)
        return sum(
            not np.array_equal(np.concatenate(incoming[r]), x)
            for _, _, incoming, found in sent
            for r, x in found.items()
        )

    return sum(ranks.run(program))


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("backwards", [False, True])
def test_many_messages_of_all_sizes_arrive_while_no_host_waits(n: int, backwards: bool) -> None:
    assert wrong(Ranks(n, delay=2e-4), 60, backwards=backwards) == 0


@pytest.mark.parametrize("kind", [READY, PULLED])
def test_without_a_wait_of_the_protocol_wrong_bytes_arrive(kind: int) -> None:
    # whoever copies late is overtaken: rank 0's copies are late, and somebody does not wait for them
    ranks = Ranks(3, delay=5e-3)
    assert wrong(ranks, 12, deaf=(1, kind))


def test_a_message_longer_than_all_slots_goes_through_them() -> None:
    def program(rank: int, channel: Any) -> bool:
        assert channel.prepare(LEAST)
        x, y = content(0, rank, 0, (4 * SLOTS + 1) * PIECE - 5), np.zeros((4 * SLOTS + 1) * PIECE - 5, dtype=np.uint8)
        other = 1 - rank
        channel.post({other: [x]}, {other: [y]}, 0, lambda: 20.0).wait()
        ranks.finish(rank)
        return np.array_equal(y, content(0, other, 0, y.size))

    ranks = Ranks(2)
    assert ranks.run(program) == [True, True]


def test_small_messages_and_captured_ones_take_the_other_way() -> None:
    def program(rank: int, channel: Any) -> list[int]:
        counts = []
        for size, prepared in ((LEAST, False), (LEAST, True), (LEAST - 1, True)):
            if prepared:
                assert not channel.prepare(LEAST - 1)
                assert channel.prepare(LEAST)
            for captured in (False, True):
                ranks.devices[rank].captured = captured
                x, y = (np.full(size, value, dtype=np.uint8) for value in (rank, 7))
                channel.post({1 - rank: [x]}, {1 - rank: [y]}, len(counts), lambda: 20.0).wait()
                ranks.finish(rank)
                assert (y == 1 - rank).all()
                counts.append(channel.small.posted)
        assert channel.name == "mail and copy engines"
        return counts

    ranks = Ranks(2)
    assert ranks.run(program) == [[1, 2, 2, 3, 4, 5]] * 2


def test_what_is_not_worth_it_takes_the_other_way_until_something_is() -> None:
    def program(rank: int, channel: Any) -> list[int]:
        counts = []
        for number, size in enumerate((LEAST, 0, LEAST - 1, LEAST)):
            assert channel.prepare(size) == (size == LEAST)
            x, y = (np.full(LEAST, value, dtype=np.uint8) for value in (rank, 7))
            channel.post({1 - rank: [x]}, {1 - rank: [y]}, number, lambda: 20.0).wait()
            ranks.finish(rank)
            assert (y == 1 - rank).all()
            counts.append(channel.small.posted)
        return counts

    ranks = Ranks(2)
    assert ranks.run(program) == [[0, 1, 2, 2]] * 2


def test_a_captured_message_asks_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[int] = []
    monkeypatch.setattr(Watch, "admit", lambda self: admitted.append(1))

    def program(rank: int, channel: Any) -> int:
        assert channel.prepare(LEAST)
        for number in range(3):
            ranks.devices[rank].captured = number < 2
            x, y = (np.full(LEAST, value, dtype=np.uint8) for value in (rank, 7))
            channel.post({1 - rank: [x]}, {1 - rank: [y]}, number, lambda: 20.0).wait()
            ranks.finish(rank)
            assert (y == 1 - rank).all()
        return int(channel.small.posted)

    ranks = Ranks(2)
    assert ranks.run(program) == [2, 2]
    assert len(admitted) == 2


@pytest.mark.parametrize("fails", ["allocate", "export", "map", "copy"])
def test_where_one_rank_cannot_none_does_and_nothing_is_kept(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "contrastile")
    ranks = Ranks(3, deadline=1.0, fails=fails)
    assert ranks.run(lambda rank, channel: channel.prepare(LEAST)) == [False] * 3
    assert {x.getMessage() for x in caplog.records} == {f"messages go by mail alone: rank 0: {fails} fails"}
    assert [device.mapped for device in ranks.devices] == [set()] * 3
    assert [bool(device.memory) for device in ranks.devices[1:]] == [False] * 2
    assert [channel.name for channel in ranks.channels] == ["mail"] * 3


def test_a_rank_may_decline_and_so_may_a_world_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "0")
    assert Ranks(2).run(lambda rank, channel: channel.prepare(LEAST)) == [False, False]
    monkeypatch.delenv(SETTING)
    hosts = iter("ab")
    monkeypatch.setattr(copies, "host", lambda: next(hosts))
    assert Ranks(2).run(lambda rank, channel: channel.prepare(LEAST)) == [False, False]


def test_a_rank_that_sends_nothing_is_named_and_what_waits_for_it_is_broken_off() -> None:
    def program(rank: int, channel: Any) -> None:
        assert channel.prepare(LEAST)
        if rank == 1:
            return
        others = [r for r in range(3) if r != rank]
        # more than the slots hold, so that what leaves waits too
        x, *ys = (np.zeros((SLOTS + 1) * PIECE, dtype=np.uint8) for _ in range(3))
        outgoing, incoming = {r: [x] for r in others}, {r: [y] for r, y in zip(others, ys, strict=True)}
        channel.post(outgoing, incoming, 0, lambda: 20.0).wait()
        with pytest.raises(Silence, match="did not answer") as caught:
            ranks.watches[rank].settle(1)
        assert 1 in caught.value.ranks
        # a channel that nobody has given up leaves everything as it is
        assert not channel._staging.leave(0.05, broken=False)
        assert ranks.devices[rank].mapped
        channel.give_up(Word((1,), ""), 0.0)

    ranks = Ranks(3, deadline=0.4)
    ranks.run(program)
    for rank, channel in enumerate(ranks.channels):
        channel.close()
        ranks.finish(rank)
        assert not ranks.devices[rank].mapped


def test_memory_is_given_back_when_nobody_maps_it_any_more() -> None:
    ranks = Ranks(3)
    assert ranks.run(lambda rank, channel: channel.prepare(LEAST)) == [True] * 3
    held = [set(device.memory) for device in ranks.devices]
    assert all(len(x) == 1 for x in held)
    for rank, channel in enumerate(ranks.channels):
        assert all(set(device.memory) == x for device, x in zip(ranks.devices, held, strict=True)), rank
        channel.close()
    assert all(channel.small.closed for channel in ranks.channels)
    assert until(lambda: not any(device.memory for device in ranks.devices), 1)
    assert not any(device.mapped for device in ranks.devices)
    assert not copies._LEFT
