"""The built-in rules by name: each finds spans in a Scan. A new rule is a file and a line here and in ``section``."""

from collections.abc import Callable, Iterator

from quantpipe.calibration.redaction.api_key import find_api_keys
from quantpipe.calibration.redaction.bank_card import find_bank_cards
from quantpipe.calibration.redaction.cn_id_card import find_cn_id_cards
from quantpipe.calibration.redaction.email import find_emails
from quantpipe.calibration.redaction.iban import find_ibans
from quantpipe.calibration.redaction.ip import find_ips
from quantpipe.calibration.redaction.phone import find_phones
from quantpipe.calibration.redaction.scan import Scan, Span
from quantpipe.calibration.redaction.section import RuleName
from quantpipe.calibration.redaction.url_credentials import find_url_credentials
from quantpipe.calibration.redaction.us_ssn import find_us_ssns

RULES_VERSION = 1  # goes up with any change of what a rule finds; it is part of the manifest

Finder = Callable[[Scan], Iterator[Span]]
RULES: dict[RuleName, Finder] = {
    "email": find_emails,
    "phone": find_phones,
    "cn_id_card": find_cn_id_cards,
    "bank_card": find_bank_cards,
    "iban": find_ibans,
    "ip": find_ips,
    "url_credentials": find_url_credentials,
    "api_key": find_api_keys,
    "us_ssn": find_us_ssns,
}
