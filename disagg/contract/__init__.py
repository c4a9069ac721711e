"""What an engine says of itself, so that another knows whether they can work together
(`docs/contract.md`).

labels(read_contract("http://10.0.0.1:9400"))["contract"]      # engines of equal ones fit
"""

from disagg.contract.client import read_contract
from disagg.contract.contract import Contract, ContractRank, joined
from disagg.contract.fit import Fit, Objection
from disagg.contract.labelling import labels
from disagg.contract.server import ContractServer

__all__ = [
    "Contract",
    "ContractRank",
    "ContractServer",
    "Fit",
    "Objection",
    "joined",
    "labels",
    "read_contract",
]
