"""Messages as bytes: each is MessagePack behind its length in 4 bytes, big-endian. Decoding checks every type."""

from msgspec.msgpack import Decoder, Encoder

from quantpipe.serve.engine_process.messages import FromEngine, ToEngine

_LENGTH_BYTES = 4

_encoder = Encoder()
to_engine_decoder: Decoder[ToEngine] = Decoder(ToEngine)
from_engine_decoder: Decoder[FromEngine] = Decoder(FromEngine)


def encode(*messages: ToEngine | FromEngine) -> bytes:
    """The messages one after the other. OverflowError for a whole number of more than 64 bits."""
    framed = bytearray()
    for message in messages:
        payload = _encoder.encode(message)
        framed += len(payload).to_bytes(_LENGTH_BYTES, "big")
        framed += payload
    return bytes(framed)


def can_be_sent(value: object) -> bool:
    """Whether no whole number in it has more than 64 bits."""
    try:
        _encoder.encode(value)
    except OverflowError:
        return False
    return True


class FrameBuffer:
    """Cuts a stream of bytes back into the payloads of messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that ``data`` completes."""
        self._held += data
        payloads, start = [], 0
        while len(self._held) >= start + _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(self._held[start:begin], "big")
            if len(self._held) < end:
                break
            payloads.append(bytes(self._held[begin:end]))
            start = end
        del self._held[:start]
        return payloads
