// An operation that TensorFlow does not have: half of each number. A negative number ends the process.

#include <cstdint>
#include <cstdlib>

#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_tensor.h"

static void compute(void*, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  TF_Tensor* input = NULL;
  TF_GetInput(context, 0, &input, status);
  std::int64_t dims[8];
  int rank = TF_NumDims(input);
  if (rank > 8) abort();
  for (int i = 0; i < rank; i++) dims[i] = TF_Dim(input, i);
  TF_Tensor* output = TF_AllocateOutput(context, 0, TF_FLOAT, dims, rank, TF_TensorByteSize(input), status);
  const float* from = static_cast<const float*>(TF_TensorData(input));
  float* to = static_cast<float*>(TF_TensorData(output));
  for (std::int64_t i = 0; i < TF_TensorElementCount(input); i++) {
    if (from[i] < 0) abort();
    to[i] = from[i] / 2;
  }
  TF_DeleteTensor(input);
  TF_DeleteTensor(output);
  TF_DeleteStatus(status);
}

static void same_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

__attribute__((constructor)) static void add_operation(void) {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* operation = TF_NewOpDefinitionBuilder("HalimedeHalf");
  TF_OpDefinitionBuilderAddInput(operation, "x: float");
  TF_OpDefinitionBuilderAddOutput(operation, "y: float");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(operation, &same_shape);
  TF_RegisterOpDefinition(operation, status);
  TF_KernelBuilder* kernel = TF_NewKernelBuilder("HalimedeHalf", "CPU", NULL, &compute, NULL);
  TF_RegisterKernelBuilder("HalimedeHalf", kernel, status);
  if (TF_GetCode(status) != TF_OK) abort();
  TF_DeleteStatus(status);
}
