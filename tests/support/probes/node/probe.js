// A gRPC client that tests run against the server, as ../go/main.go: it reads a plan from its argument and prints what it
// saw.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const REPEATERS = 4;
const MAX_MESSAGES = 5;

const CODES = Object.fromEntries(Object.entries(grpc.status).map(([name, number]) => [number, name]));
const plan = JSON.parse(process.argv[2]);
const content = Buffer.from(Float32Array.from({ length: plan.elements }, (_, i) => i % 251).buffer);
// Of a descriptor set it reads maps as lists.
const descriptors = loader.loadSync(path.join(path.dirname(plan.descriptors), 'grpc_service.proto'), {
  keepCase: true,
  longs: Number,
  oneofs: true,
});
const { GRPCInferenceService } = grpc.loadPackageDefinition(descriptors).inference;

function credentials() {
  if (!plan.root) {
    return grpc.credentials.createInsecure();
  }
  const [root, key, certificate] = [plan.root, plan.key, plan.certificate].map((file) =>
    file ? fs.readFileSync(file) : null,
  );
  return grpc.credentials.createSsl(root, key, certificate);
}

function connect() {
  const options = {
    'grpc.max_receive_message_length': -1,
    'grpc.max_send_message_length': -1,
    'grpc.initial_reconnect_backoff_ms': 100,
    'grpc.max_reconnect_backoff_ms': 200,
  };
  if (plan.keepalive_ms) {
    Object.assign(options, {
      'grpc.keepalive_time_ms': plan.keepalive_ms,
      'grpc.keepalive_timeout_ms': 1000,
      'grpc.keepalive_permit_without_calls': 1,
    });
  }
  if (plan.compression) {
    options['grpc.default_compression_algorithm'] = grpc.compressionAlgorithms[plan.compression];
  }
  return new GRPCInferenceService(plan.target, credentials(), options);
}

function request(id) {
  const parameters = {};
  for (const [name, value] of Object.entries(plan.parameters)) {
    parameters[name] = { int64_param: value };
  }
  return {
    model_name: plan.model,
    id: String(id),
    inputs: [{ name: 'IN', datatype: 'FP32', shape: [1, plan.elements] }],
    raw_input_contents: [content],
    parameters,
  };
}

function metadata() {
  const made = new grpc.Metadata();
  for (const [name, value] of Object.entries(plan.metadata)) {
    made.add(name, value);
  }
  for (const [name, value] of Object.entries(plan.binary_metadata)) {
    made.add(name, Buffer.from(value, 'base64'));
  }
  return made;
}

function read(response) {
  const outputs = response?.raw_output_contents ?? [];
  const parameters = {};
  for (const [name, value] of Object.entries(response?.parameters ?? {})) {
    parameters[name] = value[value.parameter_choice];
  }
  return {
    id: response?.id ?? '',
    error: '',
    equal: outputs.length === 1 && content.equals(outputs[0]),
    parameters,
  };
}

function callOptions() {
  return plan.deadline_ms ? { deadline: Date.now() + plan.deadline_ms } : {};
}

function cancelOnLine(call) {
  if (plan.cancel === 'line') {
    process.stdin.once('data', () => call.cancel());
  }
}

function infer(client) {
  return new Promise((resolve) => {
    const call = client.ModelInfer(request(0), metadata(), callOptions(), (error, response) => {
      if (error) {
        resolve({ code: CODES[error.code], message: error.details, answers: null });
      } else {
        resolve({ code: 'OK', message: '', answers: [read(response)] });
      }
    });
    cancelOnLine(call);
  });
}

function stream(client) {
  return new Promise((resolve) => {
    const answers = [];
    const call = client.ModelStreamInfer(metadata(), callOptions());
    cancelOnLine(call);
    call.on('data', (received) => {
      answers.push({ ...read(received.infer_response), error: received.error_message ?? '' });
      if (plan.cancel === 'first') {
        call.cancel();
      }
    });
    call.on('error', () => {}); // The status says the same.
    call.on('status', ({ code, details }) => resolve({ code: CODES[code], message: code ? details : '', answers }));
    for (let i = 0; i < plan.requests; i++) {
      call.write(request(i));
    }
    if (plan.cancel === 'never') {
      call.end();
    }
  });
}

// Calls without pause until the standard input ends.
async function repeat(client) {
  const codes = {};
  const messages = [];
  let isOver = false;
  process.stdin.on('end', () => {
    isOver = true;
  });
  process.stdin.resume();
  const once = () =>
    new Promise((resolve) => {
      client.ModelInfer(request(0), new grpc.Metadata(), { deadline: Date.now() + 20_000 }, (error) => {
        const code = error ? CODES[error.code] : 'OK';
        codes[code] = (codes[code] ?? 0) + 1;
        if (error && messages.length < MAX_MESSAGES) {
          messages.push(error.details);
        }
        // While no server listens each call fails at once.
        setTimeout(resolve, error ? 1 : 0);
      });
    });
  const caller = async () => {
    while (!isOver) {
      await once();
    }
  };
  await Promise.all(Array.from({ length: REPEATERS }, caller));
  return { codes, messages };
}

async function main() {
  const client = connect();
  const result = await { infer, stream, repeat }[plan.action](client);
  process.stdout.write(JSON.stringify(result), () => process.exit(0));
}

main();
