"""What is open of all clients, counted to the end."""

import random

import pytest

from quantpipe.errors import RequestError
from quantpipe.serve.admission.limits import Limits
from quantpipe.serve.admission.queue import AdmissionQueue, Ticket
from quantpipe.serve.submission import UnavailableError


def test_prompts_are_let_in_up_to_the_limit_and_again_as_others_leave() -> None:
    queue = AdmissionQueue(Limits(max_open_prompts=2))
    first, _second = queue.enter(), queue.enter()
    for refused in (queue.check_room, queue.enter):
        with pytest.raises(UnavailableError, match=r"queue is full \(2 open prompts\)") as caught:
            refused()
        assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 1)
    first.release()
    first.release()
    assert queue.num_prompts == 1
    queue.check_room()


def test_choices_and_tokens_are_counted_once_they_are_known() -> None:
    queue = AdmissionQueue(Limits(max_open_prompts=4, max_open_tokens=100))
    ticket, other = queue.enter(), queue.enter()
    ticket.ask(3, 60)
    assert (queue.num_prompts, queue.num_tokens) == (4, 60)
    with pytest.raises(UnavailableError, match="60 open tokens"):
        other.ask(1, 41)
    other.ask(1, 40)
    with pytest.raises(UnavailableError, match="open prompts"):
        queue.enter()
    ticket.release()
    assert (queue.num_prompts, queue.num_tokens) == (1, 40)


def test_what_can_never_get_in_is_no_matter_of_trying_again() -> None:
    ticket = AdmissionQueue(Limits(max_open_prompts=4, max_open_tokens=100)).enter()
    with pytest.raises(RequestError, match="5 choices"):
        ticket.ask(5, 5)
    with pytest.raises(RequestError, match="101 tokens"):
        ticket.ask(1, 101)


def test_a_ticket_that_was_given_back_takes_nothing_any_more() -> None:
    queue = AdmissionQueue(Limits())
    ticket = queue.enter()
    ticket.release()
    ticket.ask(2, 20)
    assert (queue.num_prompts, queue.num_tokens) == (0, 0)


def test_nothing_is_left_open_after_any_number_of_requests_and_refusals() -> None:
    draw = random.Random(1)
    queue = AdmissionQueue(Limits(max_open_prompts=8, max_open_tokens=300))
    inside: list[Ticket] = []
    num_refused = 0
    for _ in range(2000):
        if draw.random() < 0.5 and inside:
            inside.pop(draw.randrange(len(inside))).release()
            continue
        try:
            ticket = queue.enter()
        except UnavailableError:
            num_refused += 1
            continue
        inside.append(ticket)
        try:
            ticket.ask(draw.randint(1, 3), draw.randint(1, 90))
        except UnavailableError:
            num_refused += 1
            inside.pop().release()
        assert 0 <= queue.num_prompts <= 8 and 0 <= queue.num_tokens <= 300
    for ticket in inside:
        ticket.release()
    assert (queue.num_prompts, queue.num_tokens) == (0, 0)
    assert num_refused > 100
