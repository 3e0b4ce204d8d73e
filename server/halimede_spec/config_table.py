"""The fields of a model configuration under their JSON names.

`PYTHONPATH=tests python -m support.spec_tables` writes this file.
"""

from collections.abc import Mapping

from halimede_spec.config_field import ConfigField

MESSAGES: Mapping[str, Mapping[str, ConfigField]] = {
    "ModelConfig": {
        "name": ConfigField("string"),
        "platform": ConfigField("string"),
        "backend": ConfigField("string"),
        "runtime": ConfigField("string"),
        "versionPolicy": ConfigField("ModelVersionPolicy"),
        "maxBatchSize": ConfigField("int32"),
        "input": ConfigField("ModelInput", is_list=True),
        "output": ConfigField("ModelOutput", is_list=True),
        "batchInput": ConfigField("BatchInput", is_list=True),
        "batchOutput": ConfigField("BatchOutput", is_list=True),
        "optimization": ConfigField("ModelOptimizationPolicy"),
        "dynamicBatching": ConfigField(
            "ModelDynamicBatching", one_of=("dynamicBatching", "sequenceBatching", "ensembleScheduling")
        ),
        "sequenceBatching": ConfigField(
            "ModelSequenceBatching", one_of=("dynamicBatching", "sequenceBatching", "ensembleScheduling")
        ),
        "ensembleScheduling": ConfigField(
            "ModelEnsembling", one_of=("dynamicBatching", "sequenceBatching", "ensembleScheduling")
        ),
        "instanceGroup": ConfigField("ModelInstanceGroup", is_list=True),
        "defaultModelFilename": ConfigField("string"),
        "ccModelFilenames": ConfigField("string", keys="string"),
        "metricTags": ConfigField("string", keys="string"),
        "parameters": ConfigField("ModelParameter", keys="string"),
        "modelWarmup": ConfigField("ModelWarmup", is_list=True),
        "modelOperations": ConfigField("ModelOperations"),
        "modelTransactionPolicy": ConfigField("ModelTransactionPolicy"),
        "modelRepositoryAgents": ConfigField("ModelRepositoryAgents"),
        "responseCache": ConfigField("ModelResponseCache"),
        "modelMetrics": ConfigField("ModelMetrics"),
    },
    "ModelVersionPolicy": {
        "latest": ConfigField("LatestVersions", one_of=("latest", "all", "specific")),
        "all": ConfigField("AllVersions", one_of=("latest", "all", "specific")),
        "specific": ConfigField("SpecificVersions", one_of=("latest", "all", "specific")),
    },
    "ModelInput": {
        "name": ConfigField("string"),
        "dataType": ConfigField("DataType"),
        "format": ConfigField("InputFormat"),
        "dims": ConfigField("int64", is_list=True),
        "reshape": ConfigField("ModelTensorReshape"),
        "isShapeTensor": ConfigField("bool"),
        "allowRaggedBatch": ConfigField("bool"),
        "optional": ConfigField("bool"),
        "isNonLinearFormatIo": ConfigField("bool"),
    },
    "ModelOutput": {
        "name": ConfigField("string"),
        "dataType": ConfigField("DataType"),
        "dims": ConfigField("int64", is_list=True),
        "reshape": ConfigField("ModelTensorReshape"),
        "labelFilename": ConfigField("string"),
        "isShapeTensor": ConfigField("bool"),
        "isNonLinearFormatIo": ConfigField("bool"),
    },
    "BatchInput": {
        "kind": ConfigField("BatchInputKind"),
        "targetName": ConfigField("string", is_list=True),
        "dataType": ConfigField("DataType"),
        "sourceInput": ConfigField("string", is_list=True),
    },
    "BatchOutput": {
        "targetName": ConfigField("string", is_list=True),
        "kind": ConfigField("BatchOutputKind"),
        "sourceInput": ConfigField("string", is_list=True),
    },
    "ModelOptimizationPolicy": {
        "graph": ConfigField("OptimizationGraph"),
        "priority": ConfigField("ModelPriority"),
        "cuda": ConfigField("OptimizationCuda"),
        "executionAccelerators": ConfigField("ExecutionAccelerators"),
        "inputPinnedMemory": ConfigField("PinnedMemoryBuffer"),
        "outputPinnedMemory": ConfigField("PinnedMemoryBuffer"),
        "gatherKernelBufferThreshold": ConfigField("uint32"),
        "eagerBatching": ConfigField("bool"),
    },
    "ModelDynamicBatching": {
        "preferredBatchSize": ConfigField("int32", is_list=True),
        "maxQueueDelayMicroseconds": ConfigField("uint64"),
        "preserveOrdering": ConfigField("bool"),
        "priorityLevels": ConfigField("uint64"),
        "defaultPriorityLevel": ConfigField("uint64"),
        "defaultQueuePolicy": ConfigField("ModelQueuePolicy"),
        "priorityQueuePolicy": ConfigField("ModelQueuePolicy", keys="uint64"),
    },
    "ModelSequenceBatching": {
        "direct": ConfigField("StrategyDirect", one_of=("direct", "oldest")),
        "oldest": ConfigField("StrategyOldest", one_of=("direct", "oldest")),
        "maxSequenceIdleMicroseconds": ConfigField("uint64"),
        "controlInput": ConfigField("SequenceControlInput", is_list=True),
        "state": ConfigField("SequenceState", is_list=True),
        "iterativeSequence": ConfigField("bool"),
    },
    "ModelEnsembling": {
        "step": ConfigField("EnsembleStep", is_list=True),
        "maxInflightRequests": ConfigField("uint32"),
    },
    "ModelInstanceGroup": {
        "name": ConfigField("string"),
        "kind": ConfigField("InstanceKind"),
        "count": ConfigField("int32"),
        "rateLimiter": ConfigField("ModelRateLimiter"),
        "gpus": ConfigField("int32", is_list=True),
        "secondaryDevices": ConfigField("SecondaryDevice", is_list=True),
        "profile": ConfigField("string", is_list=True),
        "passive": ConfigField("bool"),
        "hostPolicy": ConfigField("string"),
    },
    "ModelParameter": {
        "stringValue": ConfigField("string"),
    },
    "ModelWarmup": {
        "name": ConfigField("string"),
        "batchSize": ConfigField("uint32"),
        "inputs": ConfigField("WarmupInput", keys="string"),
        "count": ConfigField("uint32"),
    },
    "ModelOperations": {
        "opLibraryFilename": ConfigField("string", is_list=True),
    },
    "ModelTransactionPolicy": {
        "decoupled": ConfigField("bool"),
    },
    "ModelRepositoryAgents": {
        "agents": ConfigField("RepositoryAgent", is_list=True),
    },
    "ModelResponseCache": {
        "enable": ConfigField("bool"),
    },
    "ModelMetrics": {
        "metricControl": ConfigField("MetricControl", is_list=True),
    },
    "LatestVersions": {
        "numVersions": ConfigField("uint32"),
    },
    "AllVersions": {},
    "SpecificVersions": {
        "versions": ConfigField("int64", is_list=True),
    },
    "ModelTensorReshape": {
        "shape": ConfigField("int64", is_list=True),
    },
    "OptimizationGraph": {
        "level": ConfigField("int32"),
    },
    "OptimizationCuda": {
        "graphs": ConfigField("bool"),
        "busyWaitEvents": ConfigField("bool"),
        "graphSpec": ConfigField("CudaGraphSpec", is_list=True),
        "outputCopyStream": ConfigField("bool"),
    },
    "ExecutionAccelerators": {
        "gpuExecutionAccelerator": ConfigField("Accelerator", is_list=True),
        "cpuExecutionAccelerator": ConfigField("Accelerator", is_list=True),
    },
    "PinnedMemoryBuffer": {
        "enable": ConfigField("bool"),
    },
    "ModelQueuePolicy": {
        "timeoutAction": ConfigField("TimeoutAction"),
        "defaultTimeoutMicroseconds": ConfigField("uint64"),
        "allowTimeoutOverride": ConfigField("bool"),
        "maxQueueSize": ConfigField("uint32"),
    },
    "StrategyDirect": {
        "maxQueueDelayMicroseconds": ConfigField("uint64"),
        "minimumSlotUtilization": ConfigField("float"),
    },
    "StrategyOldest": {
        "maxCandidateSequences": ConfigField("int32"),
        "preferredBatchSize": ConfigField("int32", is_list=True),
        "maxQueueDelayMicroseconds": ConfigField("uint64"),
        "preserveOrdering": ConfigField("bool"),
    },
    "SequenceControlInput": {
        "name": ConfigField("string"),
        "control": ConfigField("SequenceControl", is_list=True),
    },
    "SequenceState": {
        "inputName": ConfigField("string"),
        "outputName": ConfigField("string"),
        "dataType": ConfigField("DataType"),
        "dims": ConfigField("int64", is_list=True),
        "initialState": ConfigField("SequenceInitialState", is_list=True),
        "useSameBufferForInputOutput": ConfigField("bool"),
        "useGrowableMemory": ConfigField("bool"),
    },
    "EnsembleStep": {
        "modelName": ConfigField("string"),
        "modelVersion": ConfigField("int64"),
        "inputMap": ConfigField("string", keys="string"),
        "outputMap": ConfigField("string", keys="string"),
        "modelNamespace": ConfigField("string"),
        "when": ConfigField("string"),
    },
    "ModelRateLimiter": {
        "resources": ConfigField("RateLimiterResource", is_list=True),
        "priority": ConfigField("uint32"),
    },
    "SecondaryDevice": {
        "kind": ConfigField("SecondaryDeviceKind"),
        "deviceId": ConfigField("int64"),
    },
    "WarmupInput": {
        "dataType": ConfigField("DataType"),
        "dims": ConfigField("int64", is_list=True),
        "zeroData": ConfigField("bool", one_of=("zeroData", "randomData", "inputDataFile")),
        "randomData": ConfigField("bool", one_of=("zeroData", "randomData", "inputDataFile")),
        "inputDataFile": ConfigField("string", one_of=("zeroData", "randomData", "inputDataFile")),
    },
    "RepositoryAgent": {
        "name": ConfigField("string"),
        "parameters": ConfigField("string", keys="string"),
    },
    "MetricControl": {
        "metricIdentifier": ConfigField("MetricIdentifier"),
        "histogramOptions": ConfigField("HistogramOptions", one_of=("histogramOptions",)),
    },
    "CudaGraphSpec": {
        "batchSize": ConfigField("int32"),
        "input": ConfigField("CudaGraphShape", keys="string"),
        "graphLowerBound": ConfigField("CudaGraphLowerBound"),
    },
    "Accelerator": {
        "name": ConfigField("string"),
        "parameters": ConfigField("string", keys="string"),
    },
    "SequenceControl": {
        "kind": ConfigField("ControlKind"),
        "int32FalseTrue": ConfigField("int32", is_list=True),
        "fp32FalseTrue": ConfigField("float", is_list=True),
        "boolFalseTrue": ConfigField("bool", is_list=True),
        "dataType": ConfigField("DataType"),
    },
    "SequenceInitialState": {
        "dataType": ConfigField("DataType"),
        "dims": ConfigField("int64", is_list=True),
        "zeroData": ConfigField("bool", one_of=("zeroData", "dataFile")),
        "dataFile": ConfigField("string", one_of=("zeroData", "dataFile")),
        "name": ConfigField("string"),
    },
    "RateLimiterResource": {
        "name": ConfigField("string"),
        "global": ConfigField("bool"),
        "count": ConfigField("uint32"),
    },
    "MetricIdentifier": {
        "family": ConfigField("string"),
    },
    "HistogramOptions": {
        "buckets": ConfigField("float", is_list=True),
    },
    "CudaGraphShape": {
        "dim": ConfigField("int64", is_list=True),
    },
    "CudaGraphLowerBound": {
        "batchSize": ConfigField("int32"),
        "input": ConfigField("CudaGraphShape", keys="string"),
    },
}

ENUMS: Mapping[str, tuple[str, ...]] = {
    "DataType": (
        "TYPE_INVALID",
        "TYPE_BOOL",
        "TYPE_UINT8",
        "TYPE_UINT16",
        "TYPE_UINT32",
        "TYPE_UINT64",
        "TYPE_INT8",
        "TYPE_INT16",
        "TYPE_INT32",
        "TYPE_INT64",
        "TYPE_FP16",
        "TYPE_FP32",
        "TYPE_FP64",
        "TYPE_STRING",
        "TYPE_BF16",
    ),
    "InputFormat": ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"),
    "BatchInputKind": (
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    ),
    "BatchOutputKind": ("BATCH_SCATTER_WITH_INPUT_SHAPE",),
    "ModelPriority": ("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"),
    "InstanceKind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "TimeoutAction": ("REJECT", "DELAY"),
    "SecondaryDeviceKind": ("KIND_NVDLA",),
    "ControlKind": (
        "CONTROL_SEQUENCE_START",
        "CONTROL_SEQUENCE_READY",
        "CONTROL_SEQUENCE_END",
        "CONTROL_SEQUENCE_CORRID",
    ),
}
