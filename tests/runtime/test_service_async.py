"""The service in asyncio: nothing blocks the event loop, and a task that goes takes its request along."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from dflash_deploy.bundle.errors import BusyError, EngineError, RequestError
from dflash_deploy.runtime.accept import FinishReason
from dflash_deploy.runtime.service import Service, ServiceSettings
from toy_engines import always, greedy, sometimes, toy_decoder
from toy_service import letters, letters_codec, prompt_of, still_service, turn, turn_until

PROMPT = [5, 9, 2, 60, 31]
SOON_S = 20.0


def service_of(decoder=None, **settings) -> Service:
    return Service(decoder or toy_decoder(sometimes), ServiceSettings(**{"max_requests": 4, **settings}))


class Heart:
    """A task that ticks all the time, and passes of the target that each last some ticks.

    A pass that blocks the event loop, or a call that waits in it for a pass, would see none.
    """

    def __init__(self, decoder):
        self.ticks, self.still = 0, 0
        decoder.toy_target.before = self.before

    async def __aenter__(self):
        self.task = asyncio.create_task(self.beat())
        return self

    async def __aexit__(self, *_):
        self.task.cancel()

    async def beat(self):
        while True:
            self.ticks += 1
            await asyncio.sleep(0.0005)

    def before(self, sizes):
        ticks = self.ticks
        for _ in range(2000):  # looks, not seconds: the whole process may be held up
            if self.ticks >= ticks + 5:
                return
            time.sleep(0.0005)
        self.still += 1


async def until_idle(service: Service) -> None:
    async with asyncio.timeout(SOON_S):
        while service.stats().running or service.stats().waiting:
            await asyncio.sleep(0.001)


def test_chunks_and_the_whole():
    async def main():
        with service_of() as service:
            ticket = await service.submit_async(PROMPT, 40)
            ids = [token async for chunk in ticket for token in chunk.ids]
            whole = await (await service.submit_async(PROMPT, 40)).wait()
            again = [chunk async for chunk in ticket]
            return ids, [*whole.ids], [*ticket.result(0).ids], again

    assert asyncio.run(main()) == (*[greedy(PROMPT, 40)] * 3, [])


def test_many_at_once():
    async def one(service, index):
        ticket = await service.submit_async(prompt_of(1 + index, index), 5 + index, wait_s=SOON_S)
        if index % 2:
            return [*(await ticket.wait()).ids]
        return [token async for chunk in ticket for token in chunk.ids]

    async def main():
        with service_of(max_waiting=2) as service:
            return await asyncio.gather(*(one(service, index) for index in range(30)))

    for index, ids in enumerate(asyncio.run(main())):
        assert ids == greedy(prompt_of(1 + index, index), 5 + index)


def test_the_event_loop_is_never_blocked():
    """Neither while passes run, nor by a full queue, nor by the end of requests."""

    async def main():
        decoder = toy_decoder(always)
        service = service_of(decoder, max_requests=1, max_waiting=0, verify_rows=8)
        async with Heart(decoder) as heart:
            first = await service.submit_async(PROMPT, 12)
            second = asyncio.create_task(service.submit_async(PROMPT, 3, wait_s=SOON_S))
            ids = [token async for chunk in first for token in chunk.ids]
            assert [*(await (await second).wait()).ids] == greedy(PROMPT, 3)
            third = await service.submit_async(PROMPT, 300, wait_s=SOON_S)
            fourth = asyncio.create_task(service.submit_async(PROMPT, 3, wait_s=SOON_S))
            await asyncio.sleep(0.02)
            third.cancel()
            await third.wait()
            await (await fourth).wait()
            passes = len(decoder.toy_target.calls)
        await asyncio.to_thread(service.close)
        return ids, heart, passes

    ids, heart, passes = asyncio.run(main())
    assert ids == greedy(PROMPT, 12)
    assert heart.still == 0
    assert heart.ticks >= 5 * passes > 5 * 18


def test_a_prompt_is_tokenised_beside_the_event_loop(monkeypatch):
    async def main():
        codec = letters_codec()
        decoder = toy_decoder(codec=codec)
        service = still_service(decoder)
        async with Heart(decoder) as heart:
            encode = codec.encode_prompt

            def slow(*arguments):
                heart.before({})
                return encode(*arguments)

            monkeypatch.setattr(codec, "encode_prompt", slow)
            await service.submit_async(letters([1, 2]), 3, chat=False)
            return heart.still

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("where", ["async for", "wait", "between"])
def test_a_cancelled_task_ends_its_request(where):
    async def main():
        decoder = toy_decoder(always)
        service = service_of(decoder)
        decoder.toy_target.before = lambda sizes: time.sleep(0.002)
        reading, tickets = asyncio.Event(), []

        async def work():
            ticket = await service.submit_async(PROMPT, 390)
            tickets.append(ticket)  # it is not dropped
            if where == "wait":
                reading.set()
                await ticket.wait()
            async for _ in ticket:
                reading.set()
                if where == "between":
                    await asyncio.sleep(SOON_S)

        task = asyncio.create_task(work())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        await until_idle(service)
        stats = service.stats()
        service.close()
        return stats

    stats = asyncio.run(main())
    assert stats.finished == {"cancelled": 1}
    assert stats.new_tokens < 390


def test_leaving_the_loop_early_ends_the_request():
    async def main():
        with service_of(toy_decoder(always)) as service:
            count, ticket = 0, await service.submit_async(PROMPT, 390)
            async for chunk in ticket:
                count += len(chunk.ids)
                if count >= 3:
                    break
            await until_idle(service)
            return service.stats()

    assert asyncio.run(main()).finished == {"cancelled": 1}


def test_a_full_queue_refuses_or_waits():
    async def main():
        service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
        first = await service.submit_async(PROMPT, 4)
        with pytest.raises(BusyError):
            await service.submit_async(PROMPT, 4)
        with pytest.raises(BusyError):
            await service.submit_async(PROMPT, 4, wait_s=0.01)
        with pytest.raises(RequestError, match="got no tokens"):
            await service.submit_async([])
        waiting = asyncio.create_task(service.submit_async([1], 4, wait_s=SOON_S))
        gone = asyncio.create_task(service.submit_async([2], 4, wait_s=SOON_S))
        last = asyncio.create_task(service.submit_async([3], 4, wait_s=SOON_S))
        while len(service._queue._line) < 3:
            await asyncio.sleep(0)
        threads = threading.active_count()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        tickets = [first]
        for task, token in ((waiting, 1), (last, 3)):
            turn_until(service, tickets)
            ticket = await task
            tickets.append(ticket)
            turn_until(service, tickets)
            assert [*(await ticket.wait()).ids] == greedy([token], 4)
        assert not service._queue._line
        assert threading.active_count() <= threads
        stats = service.stats()
        return stats.submitted, stats.refused

    assert asyncio.run(main()) == (3, 2)


def test_callers_in_line_are_told_that_it_closed():
    async def main():
        service = still_service(toy_decoder(), max_requests=1, max_waiting=0)
        ticket = await service.submit_async(PROMPT, 4)
        waiting = asyncio.create_task(service.submit_async([1], 4, wait_s=float("inf")))
        while not service._queue._line:
            await asyncio.sleep(0)
        service.close()
        with pytest.raises(RequestError, match="is closed"):
            await waiting
        return (await ticket.wait()).finish_reason

    assert asyncio.run(main()) is FinishReason.CANCELLED


def test_errors_reach_who_waits():
    async def main():
        decoder = toy_decoder()
        service = still_service(decoder)
        one, two = await service.submit_async(PROMPT, 40), await service.submit_async(PROMPT, 40)
        turn(service)

        async def read():
            return [chunk async for chunk in one]

        tasks = [asyncio.create_task(read()), asyncio.create_task(two.wait())]
        await asyncio.sleep(0)
        decoder.toy_target.fail_at = 0
        turn(service)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(main())] == [EngineError, EngineError]


def test_two_event_loops_share_a_service():
    with service_of() as service:
        got: dict[int, list[int]] = {}

        async def main(index):
            tickets = [await service.submit_async([index, i], 30, wait_s=SOON_S) for i in range(4)]
            got[index] = [token for ticket in tickets for token in (await ticket.wait()).ids]

        threads = [threading.Thread(target=lambda i=i: asyncio.run(main(i))) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
        # A loop that is closed while somebody waited in it does not disturb what runs.
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(wait_for_more(service), 0.001))
        assert [*service.generate(PROMPT, 9).ids] == greedy(PROMPT, 9)
    for index in range(2):
        assert got[index] == [token for i in range(4) for token in greedy([index, i], 30)]


async def wait_for_more(service):
    ticket = await service.submit_async(PROMPT, 390)
    await ticket.wait()
    await asyncio.sleep(SOON_S)


def test_a_loop_that_is_gone_does_not_disturb_the_service():
    service = still_service(toy_decoder(always))

    async def main():
        ticket = await service.submit_async(PROMPT, 40)
        with ticket._entry.changed:
            ticket._entry.wait_in(asyncio.get_running_loop())
        return ticket

    ticket = asyncio.run(main())
    turn_until(service, [ticket])
    assert [*ticket.result(0).ids] == greedy(PROMPT, 40)
