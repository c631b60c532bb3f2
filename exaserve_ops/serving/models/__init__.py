"""Models, deployments and replicas."""

from __future__ import annotations

from exaserve_ops.serving.models.catalogue import (
    CompiledSet,
    FoundPart,
    Model,
    ModelFile,
    ModelImport,
    ModelManifest,
)
from exaserve_ops.serving.models.deployments import Deployment, NodeWish, Release, Replica
from exaserve_ops.serving.models.members import ReplicaMember
from exaserve_ops.serving.models.starts import StagedStart, StartRules

__all__ = [
    "CompiledSet",
    "Deployment",
    "FoundPart",
    "Model",
    "ModelFile",
    "ModelImport",
    "ModelManifest",
    "NodeWish",
    "Release",
    "Replica",
    "ReplicaMember",
    "StagedStart",
    "StartRules",
]
