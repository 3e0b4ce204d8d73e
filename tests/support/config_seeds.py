"""Forty configurations as people write them, in different styles; every field occurs in one of them."""

SEEDS: dict[str, bytes] = {
    "minimal": b'name: "resnet"\nplatform: "onnxruntime_onnx"\n',
    "nothing": b"# Everything comes from the model file.\n",
    "backend only": b'backend: "python"\nmax_batch_size: 0\n',
    "image classifier": b"""
# Served since spring; ask the vision team.
name: "densenet"
platform: "onnxruntime_onnx"
max_batch_size: 32
input [
  {
    name: "data_0"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 224, 224 ]
    reshape { shape: [ 1, 3, 224, 224 ] }
  }
]
output [
  {
    name: "fc6_1"
    data_type: TYPE_FP32
    dims: [ 1000 ]
    reshape { shape: [ 1, 1000, 1, 1 ] }
    label_filename: "labels.txt"
  }
]
""",
    "text model": b"""
name: "bert"
backend: "onnxruntime"
max_batch_size: 64
input [
  { name: "input_ids"      data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] optional: true }
]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ -1, 768 ] } ]
dynamic_batching { preferred_batch_size: [ 16, 32 ] max_queue_delay_microseconds: 2000 }
""",
    "one line": b'name:"m" max_batch_size:8 input{name:"x" data_type:TYPE_FP32 dims:4} output{name:"y" data_type:TYPE_FP32 dims:4}',
    "commas and semicolons": b"""
name: "m", platform: "tensorrt_plan"; max_batch_size: 16,
input { name: "x", data_type: TYPE_FP16, dims: [ 3, 640, 640 ], };
output < name: "boxes"; data_type: TYPE_FP32; dims: [ 8400, 84 ]; >
""",
    "every type": b"""
input [
  { name: "a" data_type: TYPE_BOOL dims: 1 }, { name: "b" data_type: TYPE_UINT8 dims: 1 },
  { name: "c" data_type: TYPE_UINT16 dims: 1 }, { name: "d" data_type: TYPE_UINT32 dims: 1 },
  { name: "e" data_type: TYPE_UINT64 dims: 1 }, { name: "f" data_type: TYPE_INT8 dims: 1 },
  { name: "g" data_type: TYPE_INT16 dims: 1 }, { name: "h" data_type: TYPE_INT32 dims: 1 },
  { name: "i" data_type: TYPE_INT64 dims: 1 }, { name: "j" data_type: TYPE_FP16 dims: 1 },
  { name: "k" data_type: TYPE_FP32 dims: 1 }, { name: "l" data_type: TYPE_FP64 dims: 1 },
  { name: "m" data_type: TYPE_STRING dims: 1 }, { name: "n" data_type: TYPE_BF16 dims: 1 },
  { name: "o" data_type: TYPE_INVALID dims: 1 }, { name: "p" data_type: 11 dims: 1 }
]
""",
    "repeated one by one": b"""
input { name: "x" data_type: TYPE_FP32 dims: 3 dims: 224 dims: 224 }
dynamic_batching { preferred_batch_size: 2 preferred_batch_size: [ 4, 8 ] preferred_batch_size: 16 }
""",
    "shape tensors": b"""
name: "trt" platform: "tensorrt_plan" max_batch_size: 8
input [
  { name: "image" data_type: TYPE_FP16 dims: [ 8, 224, 224 ] is_non_linear_format_io: true },
  { name: "shape" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true }
]
output [
  { name: "out" data_type: TYPE_FP16 dims: [ 8, 7, 7 ] is_non_linear_format_io: true },
  { name: "out_shape" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true }
]
instance_group { kind: KIND_GPU profile: [ "0", "1" ] }
""",
    "ragged": b"""
max_batch_size: 16
input { name: "tokens" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true }
batch_input [
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "offsets" data_type: TYPE_INT32 source_input: "tokens" },
  { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_INT32 source_input: "tokens" },
  { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: [ "a", "b" ] data_type: TYPE_FP32 source_input: "tokens" },
  { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "longest" data_type: TYPE_INT32 source_input: "tokens" },
  { kind: BATCH_ITEM_SHAPE target_name: "shapes" data_type: TYPE_INT32 source_input: "tokens" },
  { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "flat" data_type: TYPE_INT32 source_input: "tokens" }
]
batch_output { target_name: "scores" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "tokens" }
""",
    "versions latest": b"version_policy: { latest: { num_versions: 3 } }",
    "versions all": b'name: "m"\nversion_policy: { all: {} }\n',
    "versions specific": b"version_policy { specific { versions: [ 1, 3, 20240131 ] } }",
    "gpu instances": b"""
instance_group [
  { name: "first" count: 2 kind: KIND_GPU gpus: [ 0, 1 ] },
  { name: "second" count: 1 kind: KIND_GPU gpus: 2 host_policy: "numa1" },
  { count: 4 kind: KIND_CPU },
  { kind: KIND_MODEL passive: true },
  { kind: KIND_AUTO secondary_devices [ { kind: KIND_NVDLA device_id: 1 } ] }
]
""",
    "rate limiter": b"""
instance_group [
  {
    count: 2
    kind: KIND_GPU
    gpus: [ 0 ]
    rate_limiter {
      resources [
        { name: "R1" count: 4 },
        { name: "R2" global: True count: 2 }
      ]
      priority: 2
    }
  }
]
""",
    "queue policies": b"""
max_batch_size: 8
dynamic_batching {
  preserve_ordering: false
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy {
    timeout_action: DELAY
    default_timeout_microseconds: 500000
    allow_timeout_override: true
    max_queue_size: 128
  }
  priority_queue_policy {
    key: 1
    value: { timeout_action: REJECT default_timeout_microseconds: 1000000 }
  }
  priority_queue_policy { key: 3 value { max_queue_size: 16 allow_timeout_override: True } }
}
""",
    "batching by default": b"max_batch_size: 4 dynamic_batching { }",
    "batching with a colon": b"max_batch_size: 4\ndynamic_batching: { max_queue_delay_microseconds: 100 }\n",
    "sequences direct": b"""
name: "counter"
backend: "python"
max_batch_size: 8
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  direct { max_queue_delay_microseconds: 100 minimum_slot_utilization: 0.75 }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1.5e0 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
""",
    "sequences oldest": b"""
sequence_batching {
  oldest {
    max_candidate_sequences: 1024
    preferred_batch_size: [ 8, 16 ]
    max_queue_delay_microseconds: 500
    preserve_ordering: true
  }
  iterative_sequence: true
}
""",
    "sequence state": b"""
sequence_batching {
  state [
    {
      input_name: "h_in"
      output_name: "h_out"
      data_type: TYPE_FP32
      dims: [ 2, -1 ]
      initial_state: { name: "zeros" data_type: TYPE_FP32 dims: [ 2, 1 ] zero_data: true }
      use_same_buffer_for_input_output: true
      use_growable_memory: true
    },
    {
      input_name: "c_in" output_name: "c_out" data_type: TYPE_FP32 dims: 4
      initial_state { name: "saved", data_type: TYPE_FP32, dims: 4, data_file: "c.bin" }
    }
  ]
}
""",
    "ensemble": b"""
name: "pipeline"
platform: "ensemble"
max_batch_size: 8
input { name: "RAW" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "CLASS" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling {
  step [
    {
      model_name: "decode"
      model_version: -1
      input_map { key: "BYTES" value: "RAW" }
      output_map { key: "IMAGE" value: "image" }
    },
    {
      model_name: "classify"
      model_version: 2
      model_namespace: "/models/vision"
      when: "image.shape[0] > 0 and parameters.labels != 'no'"
      input_map [ { key: "x" value: "image" } ]
      output_map: { key: "label", value: "CLASS" }
    }
  ]
  max_inflight_requests: 16
}
""",
    "cuda graphs": b"""
optimization {
  cuda {
    graphs: true
    busy_wait_events: true
    output_copy_stream: true
    graph_spec [
      {
        batch_size: 8
        input { key: "x" value { dim: [ 128 ] } }
        graph_lower_bound { batch_size: 1 input { key: "x" value { dim: [ 64 ] } } }
      }
    ]
  }
}
""",
    "accelerators": b"""
optimization {
  execution_accelerators {
    gpu_execution_accelerator : [ {
      name : "tensorrt"
      parameters { key: "precision_mode" value: "FP16" }
      parameters { key: "max_workspace_size_bytes" value: "1073741824" }
    } ]
    cpu_execution_accelerator : [ { name : "openvino" parameters : { key: "device" value: "CPU" } } ]
  }
}
""",
    "optimization hints": b"""
optimization {
  graph: { level: -1 }
  priority: PRIORITY_MIN
  input_pinned_memory { enable: false }
  output_pinned_memory { enable: 0 }
  gather_kernel_buffer_threshold: 64
  eager_batching: t
}
""",
    "files": b"""
default_model_filename: "model_fp16.onnx"
cc_model_filenames [ { key: "7.5" value: "t4.plan" }, { key: "8.0" value: "a100.plan" } ]
model_operations { op_library_filename: [ "libcustom.so", 'lib/other.so' ] }
runtime: "libtriton_mine.so"
""",
    "parameters": b"""
parameters { key: "intra_op_thread_count" value: { string_value: "4" } }
parameters: { key: "EXECUTION_ENV_PATH" value: { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
parameters [ { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }, { key: "empty" value { } } ]
""",
    "quoting": rb"""
parameters { key: "path" value { string_value: "C:\\models\\net.onnx" } }
parameters { key: 'json' value { string_value: '{"a": [1, 2], "b": "it\'s"}' } }
parameters { key: "lines" value { string_value: "one\ntwo\n" "three" '\ttabbed' } }
parameters { key: "caf\303\251" value { string_value: "\xe6\x97\xa5 \u65e5 \U0001f600" } }
metric_tags { key: "team" value: "s\145arch" }
""",
    "in other scripts": 'name: "modèle_日本"\nmetric_tags { key: "équipe" value: "поиск" } # côté données\n'.encode(),
    "metrics": b"""
metric_tags { key: "team", value: "search" }
metric_tags { key: "stage", value: "canary" }
model_metrics {
  metric_control: [
    {
      metric_identifier: { family: "nv_inference_first_response_histogram_ms" }
      histogram_options: { buckets: [ 0.5, 1, 2.5e0, .1e2, 1E3, inf ] }
    }
  ]
}
""",
    "warm-up": b"""
model_warmup [
  {
    name: "zeros"
    batch_size: 8
    inputs { key: "x" value: { data_type: TYPE_FP32 dims: [ 3, 224, 224 ] zero_data: true } }
  },
  {
    name: "noise" batch_size: 1 count: 3
    inputs { key: "x" value: { data_type: TYPE_FP32 dims: [ 3, 224, 224 ] random_data: true } }
    inputs { key: "t" value: { data_type: TYPE_STRING dims: 1 input_data_file: "text.bin" } }
  }
]
""",
    "decoupled": b"""
name: "llm"
backend: "python"
model_transaction_policy { decoupled: True }
input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] }, { name: "STREAM" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
""",
    "agents and cache": b"""
model_repository_agents { agents [ { name: "checksum" parameters { key: "MD5:1/model.onnx" value: "d41d8cd98f00b204" } } ] }
response_cache { enable: true }
""",
    "hexadecimal and octal": b"max_batch_size: 0x10 version_policy { latest { num_versions: 017 } } input { dims: -0X2 }",
    "signs apart": b"input { dims: - 1 dims: -# any size\n1 }",
    "comments everywhere": b"""#first
name#1
:#2
"m"#3
input#4
[#5
{#6
dims#7
:[#8
1#9
,#10
2#11
]#12
}#13
]#14""",
    "windows": b'name: "m"\r\nmax_batch_size: 8\r\ninput [\r\n  { name: "x"\tdata_type: TYPE_FP32\tdims: [ 4 ] }\r\n]\r\n',
    "limits": b"""
max_batch_size: 2147483647
dynamic_batching {
  max_queue_delay_microseconds: 18446744073709551615
  priority_queue_policy { key: 18446744073709551615 value { max_queue_size: 4294967295 } }
}
input { name: "x" dims: [ 9223372036854775807, -9223372036854775808 ] }
instance_group { count: -2147483648 }
""",
    "defaults given twice": b'max_batch_size: 0 max_batch_size: 4 name: "" name: "m" response_cache { enable: false enable: true }',
}
