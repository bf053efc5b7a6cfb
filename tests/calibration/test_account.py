"""The account as a table for a terminal."""

from quantpipe.calibration.account import SourceAccount, account_table

TICKETS = SourceAccount(
    name="tickets.csv",
    num_samples_available=1200,
    num_samples_used=300,
    num_tokens_available=60_000,
    num_tokens_used=24_000,
    num_samples_truncated=1,
    num_tokens_asked=24_000,
    is_estimate=True,
    dropped={"empty": 3, "near duplicate": 1234},
    redacted={"email": 17},
)
NOTES = SourceAccount("notes.txt", 20, 20, 900, 900, 0, num_tokens_asked=900)


def test_a_line_for_each_source_and_what_was_dropped_below_it() -> None:
    assert account_table([TICKETS, NOTES]).splitlines() == [
        "source        asked  available    used        samples  truncated",
        "tickets.csv  24,000    ~60,000  24,000  300 of ~1,200          1",
        "  dropped: 3 empty, 1,234 near duplicate",
        "  redacted: 17 email",
        "notes.txt       900        900     900       20 of 20          0",
        "total        24,900    ~60,900  24,900  320 of ~1,220          1",
    ]


def test_one_source_has_no_total() -> None:
    assert account_table([NOTES]).splitlines() == [
        "source     asked  available  used   samples  truncated",
        "notes.txt    900        900   900  20 of 20          0",
    ]
