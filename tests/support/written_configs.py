"""Three configurations as people write them, which use most of the fields."""

VISION = """
# A vision model, as people write them.
name: "resnet50"
platform: "onnxruntime_onnx"
max_batch_size: 0x10            # sixteen
input [
  {
    name: "input"
    data_type: TYPE_FP32
    format: FORMAT_NCHW
    dims: [ 3, 224, 224 ]       # C, H, W
    reshape { shape: [ 1, 3, 224, 224 ] }
  },
  { name: "mask", data_type: TYPE_BOOL, dims: -1; optional: true }
]
output {
  name: "output"
  data_type: TYPE_FP32
  dims: 1000
  label_filename: 'labels' ".txt"
}
instance_group [
  { count: 2 kind: KIND_GPU gpus: [ 0, 1 ]
    rate_limiter { resources [ { name: "R1" global: True count: 3 } ] priority: 2 } }
]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
  default_queue_policy < timeout_action: DELAY default_timeout_microseconds: 5000 >
  priority_queue_policy { key: 2 value: { max_queue_size: 7 } }
}
version_policy: { specific: { versions: [ 1, 3 ] } }
optimization { cuda { graphs: t } priority: PRIORITY_MAX eager_batching: 1 }
parameters { key: "threads" value { string_value: "4" } }
parameters: { key: "caf\\303\\251", value: { string_value: "\\"x\\"\\n" } },
"""


SEQUENCES = """
name: "stateful" backend: "python"
sequence_batching {
  max_sequence_idle_microseconds: 5000000
  direct { minimum_slot_utilization: .5f }
  control_input [
    {
      name: "START"
      control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ]
    },
    {
      name: "CORRID"
      control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }
    }
  ]
  state [ {
    input_name: "in" output_name: "out" data_type: TYPE_INT32 dims: [ -1 ]
    initial_state: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: false name: "zero" }
  } ]
}
model_warmup [ {
  name: "first" batch_size: 1
  inputs { key: "x" value: { data_type: TYPE_STRING dims: [ 2 ] random_data: true } }
} ]
"""


ENSEMBLE = """
name: "pipeline"
platform: "ensemble"
version_policy { all { } }
ensemble_scheduling {
  step [
    { model_name: "a" model_version: -1
      input_map { key: "A_IN" value: "raw" }
      output_map { key: "A_OUT" value: "mid" } },
    { model_name: "b" model_version: 2
      input_map [ { key: "B0" value: "mid" }, { key: "B1" value: "raw" } ] }
  ]
}
"""
