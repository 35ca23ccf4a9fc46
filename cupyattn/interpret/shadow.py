"""Record which threads accessed each word of memory, and find hazards.

Words are *granules*, as wide as the kernel's narrowest access to that memory. So neighbouring
elements of different threads never share a granule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from cupyattn.interpret.distinct import distinct
from cupyattn.interpret.ordering import ENGINE, WARP, Bools, Clocks, Ints, Times

#: Largest number of granules whose reads may stay in the log before they are entered by thread.
MAX_RECENT = 1 << 22
#: Largest number of instructions whose reads may stay in the log, which every write compares.
MAX_WAITING = 1024


def spread(first: Ints, lanes: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the `count` consecutive numbers from each of `first`, and the lane of each."""
    if count == 1:
        return first, lanes
    return (first[:, None] + np.arange(count)).ravel(), np.repeat(lanes, count)


@dataclass(slots=True)
class _Reads:
    """Reads of one instruction: `count` granules from each of `first` on, by `lanes`.

    `reach` are the first and the last of them, as numbers in the memory of a block.
    """

    time: int
    first: Ints
    lanes: Ints
    count: int
    reach: tuple[int, int] | None = None


class Report(Protocol):
    """Raises a finding about the instruction under way."""

    def __call__(
        self, kind: str, message: str, lanes: Ints, bad: Bools, address: Ints | None = None
    ) -> NoReturn:
        """Report the access of the first of the `bad` lanes, at its byte of `address`."""


class Shadow:
    """The history of one piece of memory.

    Parameters
    ----------
    name : str
        Name of the memory in findings.
    granules : int
        Number of words.
    granule_bytes : int
        Bytes of a word.
    readers : int
        For the memory of a single block: its number of threads, whose last reads are stored. 0
        keeps a log of reads instead.
    initialised : bool
        Whether it was written before the launch.
    first : int
        Offset in findings of the first word, in bytes.
    period : int, optional
        Bytes after which offsets in findings restart, because another block's memory begins.
    """

    def __init__(
        self,
        name: str,
        granules: int,
        granule_bytes: int,
        readers: int,
        *,
        initialised: bool,
        first: int = 0,
        period: int | None = None,
    ) -> None:
        self.name = name
        self._first, self._period = first, period
        self.granule_bytes = granule_bytes
        self.readers = readers
        self.writer = np.full(granules, -1, np.int32)
        # Time of the last write; 0 is before the launch, -1 never.
        self.written = np.full(granules, 0 if initialised else -1, np.int32)
        self.atomic = np.zeros(granules, np.bool_)  # whether that write was an atomic operation
        self.read = np.zeros(granules, np.int32)  # time of the last read by any thread
        # Time of each thread's last read: (warps, granules, lanes of a warp). If only the first
        # lane of a warp read, for the whole warp, the time is in `first_reads`: (warps, granules).
        # NOTE: pages of zeros that are not touched take no memory, and what the lanes of a warp
        # read together lies close together.
        self.reads = np.zeros((readers // WARP, granules, WARP), np.int32)
        self.first_reads = np.zeros((readers // WARP, granules), np.int32)
        self.lane_read = np.zeros(granules, np.int32)  # the latest time in `reads`
        self.flying = np.zeros(granules, np.bool_)  # destination of an asynchronous copy in flight
        self.lent = np.zeros(granules, np.int16)  # asynchronous operations that still read it
        # Time of the last read by the copy engine, whose end only an mbarrier tells.
        self._taken: Times | None = None

        # Whether the last write was a thread's, and no proxy fence has shown it to the asynchronous
        # proxy. If a fence has: its time, and its lane.
        self.hidden = np.zeros(granules, np.bool_)
        self.fenced = np.zeros(granules, np.int32)
        self.fenced_by = np.zeros(granules, np.int32)
        self._log: list[tuple[int, Ints, Ints]] = []  # time, granules, lanes
        self._of_block = granules if period is None else period // granule_bytes
        # Reads that `read` and `reads` do not have yet.
        self._recent: list[_Reads] = []
        self._recent_granules = 0
        # Reads by atomic operations, with which only plain writes can race.
        self._strong: list[_Reads] = []
        self._unwritten = 0 if initialised else granules
        self._flights = 0
        self._loans = 0
        self._last_read = 0  # of those in `read`
        self._last_write = 0
        self._engine_writes = False
        #: Whether copies of other blocks may arrive here, which no barrier of this block orders.
        self.others_write = False
        #: Called for every write with granules and lanes, if threads outside of `readers` have
        #: read.
        self.before_any_write: Callable[[Ints, Ints], None] | None = None

    def forget(self, granules: Ints) -> None:
        """Record that `granules`, each named once, have no value before the launch."""
        self.written[granules] = -1
        self._unwritten = len(granules)

    @property
    def was_written(self) -> bool:
        """Whether any thread wrote to it in this launch."""
        return self._last_write > 0

    def before_read(
        self,
        first: Ints,
        lanes: Ints,
        clocks: Clocks,
        report: Report,
        *,
        count: int = 1,
        atomic: bool = False,
    ) -> None:
        """Check and record that `lanes` read `count` granules each, from `first` on.

        If all granules were written and the whole block has synchronised since, nothing can be
        wrong.
        """
        met = self.readers and self._last_write <= clocks.oldest
        if self._flights or self._unwritten or not met:
            granules, owners = spread(first, lanes, count)
            self._check_flights(granules, owners, report, "read")
            self.check_written(granules, owners, report)
            written = self.written[granules]
            if not met:
                if atomic:
                    written = np.where(self.atomic[granules], np.int32(0), written)
                self._check_writer(granules, owners, written, clocks, report, "read")
        if atomic:
            self._strong.append(_Reads(clocks.now, first, lanes + clocks.first, count))
        elif self.readers:
            self._recent.append(_Reads(clocks.now, first, lanes, count))
            self._recent_granules += len(first) * count
            if self._recent_granules > MAX_RECENT:
                self._enter_reads(clocks)
        else:
            self._note_read(clocks.now, granules, owners + clocks.first)

    def check_written(self, granules: Ints, lanes: Ints, report: Report) -> None:
        """Report `granules` that have no value, and which `lanes` are about to use."""
        if self._unwritten and (missing := self.written[granules] < 0).any():
            message = f"{self.name} is read before anything was written there"
            report("never written", message, lanes, missing, self._address(granules))

    def before_far_read(
        self,
        granules: Ints,
        lanes: Ints,
        ordered_until: Callable[[Ints, Ints], Times],
        clocks: Clocks,
        report: Report,
    ) -> None:
        """Check that `lanes` of other blocks may read `granules` of this memory.

        `ordered_until` returns the time up to which lanes are ordered after others.
        """
        self._check_flights(granules, lanes, report, "read")
        self.check_written(granules, lanes, report)
        written = self.written[granules]
        writer = (self.writer[granules] - clocks.first).astype(np.intp)
        late = written > ordered_until(lanes, writer)
        self._report_writer(granules, lanes, writer, late, clocks, report, "read")

    def _note_read(self, time: int, granules: Ints, lanes: Ints) -> None:
        self.read[granules] = self._last_read = time
        self._log.append((time, granules, lanes))

    def _enter_strong_reads(self, clocks: Clocks) -> None:
        """Move these reads to the others, because the next write is no atomic operation."""
        strong, self._strong = self._strong, []
        for one in strong:
            if self.readers:
                own = one.lanes - clocks.first
                self._recent.append(_Reads(one.time, one.first, own, one.count))
            else:
                self._note_read(one.time, *spread(one.first, one.lanes, one.count))

    def _enter_reads(self, clocks: Clocks, written: Ints | None = None) -> None:
        """Enter the logged `read` and `reads`, except reads before a barrier of all threads.

        No write can conflict with these. Reads far from the granules that will be `written` stay
        in the log. In most kernels all threads synchronise before a write to those, so they need
        not be entered.
        """
        oldest = 0 if self.others_write else clocks.oldest
        recent = [one for one in self._recent if one.time > oldest]
        self._recent, self._recent_granules = [], 0
        if not recent:
            return
        near = None
        if written is not None and len(recent) <= MAX_WAITING:
            near = self._reach(written, 1)
        for one in recent:
            if near is not None:
                first, last = one.reach = one.reach or self._reach(one.first, one.count)
                if first > near[1] or last < near[0]:
                    self._recent.append(one)
                    self._recent_granules += len(one.first) * one.count
                    continue
            self._enter(one)

    def _reach(self, first: Ints, count: int) -> tuple[int, int]:
        """Return the first and the last granule, as numbers in the memory of a block."""
        within = first % self._of_block
        return int(within.min(initial=self._of_block)), int(within.max(initial=-1)) + count - 1

    def _enter(self, one: _Reads) -> None:
        granules, owners = spread(one.first, one.lanes % self.readers, one.count)
        # NOTE: one index instead of two takes half of the time.
        warps, lanes = np.divmod(owners, WARP)
        place, reads = warps * len(self.read) + granules, self.first_reads.reshape(-1)
        if lanes.any():
            place, reads = place * WARP + lanes, self.reads.reshape(-1)
            self.lane_read[granules] = np.maximum(self.lane_read[granules], one.time)
        if one.time >= self._last_read:
            self.read[granules] = reads[place] = self._last_read = one.time
        else:  # it waited while later ones were entered
            self.read[granules] = np.maximum(self.read[granules], one.time)
            reads[place] = np.maximum(reads[place], one.time)

    def before_write(
        self, granules: Ints, lanes: Ints, clocks: Clocks, report: Report, *, atomic: bool = False,
        block: int | None = None,
    ) -> None:  # fmt: skip
        """Check that `lanes` may write `granules`, of another `block` of the batch if it is given.
        """
        self._check_flights(granules, lanes, report, "written")
        if self.before_any_write is not None:
            self.before_any_write(granules, lanes)
        if self._loans and (lent := self.lent[granules] > 0).any():
            message = f"{self.name} is written while an asynchronous operation still reads it"
            report("in flight", message, lanes, lent, self._address(granules))
        if self._taken is not None:
            late = self._taken[granules] > clocks.saw_engine(lanes)
            if late.any():
                message = (
                    f"{self.name} is written, and nothing orders that after the copy engine read it"
                )
                report("race", message, lanes, late, self._address(granules))
        own = self.readers > 0 and block is None
        oldest = clocks.oldest if own else 0
        if self._strong and not atomic:
            self._enter_strong_reads(clocks)
        if self._last_write > oldest or self._engine_writes:
            written = self.written[granules]
            if atomic:  # atomic operations do not race with each other
                written = np.where(self.atomic[granules], np.int32(0), written)
            self._check_writer(granules, lanes, written, clocks, report, "written")
        if self._recent:
            self._enter_reads(clocks, granules)
        if self._last_read > oldest:
            late = self.read[granules] > (clocks.floor[lanes] if own else 0)
            if late.any():
                self._check_readers(granules[late], lanes[late], clocks, report, block)

    def wrote(
        self, granules: Ints, lanes: Ints, clocks: Clocks, report: Report, *, atomic: bool = False,
        agree: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """Record that `lanes` wrote `granules`; report two lanes that did so in one instruction.

        If `agree` says that they wrote the same values, their order does not matter.
        """
        writer = (lanes + clocks.first).astype(np.int32)
        self.writer[granules] = writer
        self._note_write(granules, clocks)
        self.atomic[granules] = atomic
        self.hidden[granules] = True
        if not atomic:
            lost = self.writer[granules] != writer
            if lost.any() and not (agree is not None and agree()):
                message = f"{self.name} is written by two lanes at once"
                report("race", message, lanes, lost, self._address(granules))

    def _note_write(self, granules: Ints, clocks: Clocks) -> None:
        if self._unwritten:
            new = granules[self.written[granules] < 0]
            self._unwritten -= len(distinct(new))
        self.written[granules] = self._last_write = clocks.now

    def take_off(self, granules: Ints) -> None:
        """Record that an asynchronous copy to `granules` has begun."""
        self.flying[granules] = True
        self._flights += len(granules)

    def land(self, granules: Ints) -> None:
        """Record that a thread has waited for an asynchronous copy to `granules`."""
        self.flying[granules] = False
        self._flights -= len(granules)

    def wrote_by_engine(self, granules: Ints, clocks: Clocks) -> None:
        """Record that the copy engine wrote `granules`."""
        self._engine_writes = True
        self.writer[granules] = ENGINE
        self._note_write(granules, clocks)
        self.atomic[granules] = self.hidden[granules] = False
        self.fenced[granules] = 0

    # ---- the asynchronous proxy ------------------------------------------------------------------

    def lend(self, granules: Ints) -> None:
        """Record that an asynchronous operation has begun to read `granules`, each named once."""
        self.lent[granules] += 1
        self._loans += len(granules)

    def give_back(self, granules: Ints, lanes: Ints, clocks: Clocks) -> None:
        """Record that the operation has ended, for `lanes` that waited for it."""
        self.lent[granules] -= 1
        self._loans -= len(granules)
        self.read[granules] = self._last_read = clocks.now
        for lane in lanes.tolist():
            warp, of_warp = divmod(lane % self.readers, WARP)
            if of_warp:
                self.reads[warp, granules, of_warp] = self.lane_read[granules] = clocks.now
            else:
                self.first_reads[warp][granules] = clocks.now

    def before_engine_reads(
        self, granules: Ints, lanes: Ints, clocks: Clocks, report: Report
    ) -> None:
        """Check that the copy engine may read `granules` on behalf of `lanes`, which read nothing
        themselves."""
        self._check_flights(granules, lanes, report, "read")
        self.check_written(granules, lanes, report)
        self._check_writer(granules, lanes, self.written[granules], clocks, report, "read")

    def taken_by_engine(self, granules: Ints, clocks: Clocks) -> None:
        """Record that the copy engine has read `granules` that were lent, and an mbarrier tells."""
        self.lent[granules] -= 1
        self._loans -= len(granules)
        if self._taken is None:
            self._taken = np.zeros(len(self.lent), np.int32)
        self._taken[granules] = clocks.now

    def fence(self, granules: slice, lanes: Ints, clocks: Clocks) -> None:
        """Make accesses before `lanes`, of the block of `granules`, visible to the proxy."""
        hidden = np.flatnonzero(self.hidden[granules]) + granules.start
        if not len(hidden):
            return
        writer = self.writer[hidden] - clocks.first
        own = np.isin(writer, lanes)
        who = np.where(own, writer, lanes[0])
        before = clocks.ordered(who.astype(np.intp), writer.astype(np.intp), self.written[hidden])
        shown = own | before
        self.hidden[hidden[shown]] = False
        self.fenced[hidden[shown]] = clocks.now
        self.fenced_by[hidden[shown]] = who[shown] + clocks.first

    def before_proxy(self, granules: Ints, lanes: Ints, clocks: Clocks, report: Report) -> None:
        """Report threads' writes that may not be visible to the asynchronous proxy of `lanes`."""
        bad = self.hidden[granules] & (self.written[granules] > 0)
        some = np.flatnonzero(self.fenced[granules])
        if len(some):
            shown = granules[some]
            by = (self.fenced_by[shown] - clocks.first).astype(np.intp)
            bad[some] |= ~clocks.ordered(lanes[some], by, self.fenced[shown])
        if bad.any():
            message = (
                f"{self.name} is handed to the asynchronous proxy, and no fence.proxy.async stands "
                "between that and the last write by a thread"
            )
            report("race", message, lanes, bad, self._address(granules))

    # ---- checks ----------------------------------------------------------------------------------

    def _address(self, granules: Ints) -> Ints:
        address = granules * self.granule_bytes
        if self._period is not None:
            address %= self._period
        return address + self._first

    def _check_flights(self, granules: Ints, lanes: Ints, report: Report, verb: str) -> None:
        if self._flights and (flying := self.flying[granules]).any():
            message = f"{self.name} is {verb} while an asynchronous copy to it is not waited for"
            report("in flight", message, lanes, flying, self._address(granules))

    def _check_writer(
        self,
        granules: Ints,
        lanes: Ints,
        written: Times,
        clocks: Clocks,
        report: Report,
        verb: str,
    ) -> None:
        if written.max() <= 0:
            return
        writer = (self.writer[granules] - clocks.first).astype(np.intp)
        late = ~(clocks.ordered(lanes, writer, written) | (written <= 0))
        self._report_writer(granules, lanes, writer, late, clocks, report, verb)

    def _report_writer(
        self,
        granules: Ints,
        lanes: Ints,
        writer: Ints,
        late: npt.NDArray[np.bool_],
        clocks: Clocks,
        report: Report,
        verb: str,
    ) -> None:
        """Report writes that are too `late` to be ordered before `lanes` now."""
        if late.any():
            row = int(np.argmax(late))
            other = _name(clocks, int(writer[row]), int(lanes[row]))
            message = f"{self.name} is {verb}, and nothing orders that after the write by {other}"
            report("race", message, lanes, late, self._address(granules))

    def _check_readers(
        self, granules: Ints, lanes: Ints, clocks: Clocks, report: Report, block: int | None
    ) -> None:
        """Find a read of `granules` that is not ordered before `lanes` now."""
        if self.readers:
            for part in range(0, len(lanes), 1024):
                some, who = granules[part : part + 1024], lanes[part : part + 1024]
                writers, of_row = np.unique(who, return_inverse=True)
                if block is None:
                    view = clocks.views(writers)[:, : clocks.threads]
                else:
                    known = [clocks.between.view(clocks, x, block) for x in writers.tolist()]
                    view = np.stack(known)
                # Few granules have late reads of single lanes, whose times are many to compare.
                late = self.lane_read[some] > view.min(axis=1)[of_row]
                late |= (self.first_reads[:, some] > view.T[::WARP, of_row]).any(axis=0)
                some, who, view = some[late], who[late], view[of_row[late]]
                view = view.reshape(len(view), len(self.reads), WARP).swapaxes(0, 1)
                unordered = self.reads[:, some] > view  # (warps, granules, lanes)
                unordered[..., 0] |= self.first_reads[:, some] > view[..., 0]
                if unordered.any():
                    by_thread = unordered.swapaxes(0, 1).reshape(len(some), -1)
                    row, thread = (int(x[0]) for x in by_thread.nonzero())
                    owner = int(who[row]) // clocks.threads if block is None else block
                    reader = owner * clocks.threads + thread
                    self._report_reader(row, reader, some, who, clocks, report)
            return
        order = np.argsort(granules, kind="stable")
        for time, earlier, readers in self._log:
            found = np.searchsorted(granules, earlier, sorter=order).clip(max=len(order) - 1)
            place = order[found]
            met = granules[place] == earlier
            rows, others = place[met], readers[met] - clocks.first
            times = np.full(len(rows), time, np.int32)
            before = clocks.ordered(lanes[rows], others, times)
            if not before.all():
                first = int(np.argmin(before))
                row, reader = int(rows[first]), int(others[first])
                self._report_reader(row, reader, granules, lanes, clocks, report)

    def _report_reader(
        self, row: int, reader: int, granules: Ints, lanes: Ints, clocks: Clocks, report: Report
    ) -> None:
        other = _name(clocks, reader, int(lanes[row]))
        message = f"{self.name} is written, and nothing orders that after the read by {other}"
        bad = np.arange(len(lanes)) == row
        report("race", message, lanes, bad, self._address(granules))


def _name(clocks: Clocks, other: int, lane: int) -> str:
    """Return the name of a lane, with its block if that differs from another lane's block."""
    if other < ENGINE // 2:
        return "the copy engine"
    block, thread = divmod(other, clocks.threads)
    number = clocks.first // clocks.threads + block
    where = "" if block == lane // clocks.threads else f"block {number} "
    return f"{where}warp {thread // WARP} lane {thread % WARP}"
