"""Parcels as Flower's messages: facts (JSON) and tensors (safetensors bytes, as one uint8 array). A message's type names the operation."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlens.deploy.wire import Parcel

FACTS, TENSORS = "facts", "tensors"


def to_record(parcel: Parcel) -> RecordDict:
    found = RecordDict({FACTS: ConfigRecord({FACTS: parcel.told})})
    if parcel.tensors:
        found[TENSORS] = ArrayRecord({TENSORS: as_array(parcel.tensors)})
    return found


def from_record(record: RecordDict) -> Parcel:
    """A message's content as a parcel; anything of another form is refused."""
    facts = record.get(FACTS)
    told = facts.get(FACTS) if isinstance(facts, ConfigRecord) else None
    tensors = record.get(TENSORS)
    if tensors is None:
        return Parcel.read(told, b"")
    array = tensors.get(TENSORS) if isinstance(tensors, ArrayRecord) else None
    return Parcel.read(told, array.data if array is not None else None)


def as_array(data: bytes) -> Array:
    return Array("uint8", (len(data),), "safetensors", data)
