import com.google.gson.Gson;
import com.google.protobuf.ByteString;
import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.DynamicMessage;
import com.google.protobuf.Message;
import io.grpc.CallOptions;
import io.grpc.ChannelCredentials;
import io.grpc.ClientCall;
import io.grpc.ConnectivityState;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.ProtoUtils;
import java.io.File;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** A gRPC client that tests run against the server, as ../go/main.go: it reads a plan from its argument and prints what it saw. */
public final class Probe {
    private static final int REPEATERS = 4;
    private static final int MAX_MESSAGES = 5;
    private static final String SERVICE = "inference.GRPCInferenceService";

    /** What a test asks for. */
    static final class Plan {
        String target, descriptors, action, model, compression, cancel, root, certificate, key;
        int elements, requests;
        long deadline_ms, keepalive_ms;
        Map<String, Long> parameters;
        Map<String, String> metadata, binary_metadata;
    }

    /** One message of the server. */
    static final class Answer {
        String id = "", error = "";
        boolean equal;
        Map<String, Object> parameters = new HashMap<>();
    }

    /** What the program prints. */
    static final class Result {
        String code, message;
        List<Answer> answers = new ArrayList<>();
        Map<String, Integer> codes = new HashMap<>();
        List<String> messages = new ArrayList<>();
    }

    private final Plan plan;
    private final ManagedChannel channel;
    private final Descriptor request, response, streamed;
    private final ByteString content;

    public static void main(String[] arguments) throws Exception {
        Gson gson = new Gson();
        Probe probe = new Probe(gson.fromJson(arguments[0], Plan.class));
        Result result = probe.plan.action.equals("repeat") ? probe.repeat() : probe.call(probe.plan.action);
        System.out.println(gson.toJson(result));
        System.exit(0);
    }

    private Probe(Plan plan) throws Exception {
        this.plan = plan;
        FileDescriptorSet set = FileDescriptorSet.parseFrom(Files.readAllBytes(Path.of(plan.descriptors)));
        FileDescriptor configuration = FileDescriptor.buildFrom(set.getFile(0), new FileDescriptor[0]);
        FileDescriptor service = FileDescriptor.buildFrom(set.getFile(1), new FileDescriptor[] {configuration});
        request = service.findMessageTypeByName("ModelInferRequest");
        response = service.findMessageTypeByName("ModelInferResponse");
        streamed = service.findMessageTypeByName("ModelStreamInferResponse");
        ByteBuffer buffer = ByteBuffer.allocate(4 * plan.elements).order(ByteOrder.LITTLE_ENDIAN);
        for (int i = 0; i < plan.elements; i++) {
            buffer.putFloat(i % 251);
        }
        content = ByteString.copyFrom(buffer.flip());
        channel = connect();
    }

    /** Waits for the connection, so that a deadline is not over before the JVM has loaded what connecting takes. */
    private void await() throws Exception {
        CompletableFuture<Void> changed = new CompletableFuture<>();
        ConnectivityState state = channel.getState(true);
        if (state == ConnectivityState.IDLE || state == ConnectivityState.CONNECTING) {
            channel.notifyWhenStateChanged(state, () -> changed.complete(null));
            changed.get();
            await();
        }
    }

    private ManagedChannel connect() throws Exception {
        ChannelCredentials credentials = InsecureChannelCredentials.create();
        if (!plan.root.isEmpty()) {
            TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder().trustManager(new File(plan.root));
            if (!plan.certificate.isEmpty()) {
                tls.keyManager(new File(plan.certificate), new File(plan.key));
            }
            credentials = tls.build();
        }
        ManagedChannelBuilder<?> builder =
                Grpc.newChannelBuilder(plan.target, credentials).maxInboundMessageSize(Integer.MAX_VALUE);
        if (plan.keepalive_ms > 0) {
            builder.keepAliveTime(plan.keepalive_ms, TimeUnit.MILLISECONDS)
                    .keepAliveTimeout(1, TimeUnit.SECONDS)
                    .keepAliveWithoutCalls(true);
        }
        return builder.build();
    }

    private DynamicMessage newRequest(String id) {
        DynamicMessage.Builder made = DynamicMessage.newBuilder(request);
        made.setField(request.findFieldByName("model_name"), plan.model);
        made.setField(request.findFieldByName("id"), id);
        made.addRepeatedField(request.findFieldByName("raw_input_contents"), content);
        FieldDescriptor inputs = request.findFieldByName("inputs");
        Descriptor tensor = inputs.getMessageType();
        made.addRepeatedField(inputs, DynamicMessage.newBuilder(tensor)
                .setField(tensor.findFieldByName("name"), "IN")
                .setField(tensor.findFieldByName("datatype"), "FP32")
                .addRepeatedField(tensor.findFieldByName("shape"), 1L)
                .addRepeatedField(tensor.findFieldByName("shape"), (long) plan.elements)
                .build());
        FieldDescriptor parameters = request.findFieldByName("parameters");
        Descriptor entry = parameters.getMessageType();
        Descriptor value = entry.findFieldByName("value").getMessageType();
        plan.parameters.forEach((name, number) -> made.addRepeatedField(parameters, DynamicMessage.newBuilder(entry)
                .setField(entry.findFieldByName("key"), name)
                .setField(entry.findFieldByName("value"), DynamicMessage.newBuilder(value)
                        .setField(value.findFieldByName("int64_param"), number)
                        .build())
                .build()));
        return made.build();
    }

    private Answer read(Message message) {
        Answer answer = new Answer();
        Message inferred = message;
        if (message.getDescriptorForType() == streamed) {
            answer.error = (String) message.getField(streamed.findFieldByName("error_message"));
            inferred = (Message) message.getField(streamed.findFieldByName("infer_response"));
        }
        answer.id = (String) inferred.getField(response.findFieldByName("id"));
        List<?> outputs = (List<?>) inferred.getField(response.findFieldByName("raw_output_contents"));
        answer.equal = outputs.size() == 1 && outputs.get(0).equals(content);
        for (Object each : (List<?>) inferred.getField(response.findFieldByName("parameters"))) {
            Message entry = (Message) each;
            Message value = (Message) entry.getField(entry.getDescriptorForType().findFieldByName("value"));
            String name = (String) entry.getField(entry.getDescriptorForType().findFieldByName("key"));
            value.getAllFields().values().forEach(chosen -> answer.parameters.put(name, chosen));
        }
        return answer;
    }

    private Metadata metadata() {
        Metadata made = new Metadata();
        plan.metadata.forEach(
                (name, value) -> made.put(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER), value));
        plan.binary_metadata.forEach((name, value) -> made.put(
                Metadata.Key.of(name, Metadata.BINARY_BYTE_MARSHALLER), Base64.getDecoder().decode(value)));
        return made;
    }

    /** One call of the action `infer` or `stream`. */
    private Result call(String action) throws Exception {
        boolean isStream = action.equals("stream");
        MethodDescriptor<Message, Message> method = MethodDescriptor.<Message, Message>newBuilder()
                .setType(isStream ? MethodType.BIDI_STREAMING : MethodType.UNARY)
                .setFullMethodName(SERVICE + (isStream ? "/ModelStreamInfer" : "/ModelInfer"))
                .setRequestMarshaller(ProtoUtils.marshaller(DynamicMessage.getDefaultInstance(request)))
                .setResponseMarshaller(
                        ProtoUtils.marshaller(DynamicMessage.getDefaultInstance(isStream ? streamed : response)))
                .build();
        if (plan.deadline_ms > 0) {
            await();
        }
        List<Message> requests = new ArrayList<>();
        for (int i = 0; i < (isStream ? plan.requests : 1); i++) {
            requests.add(newRequest(Integer.toString(i)));
        }
        CallOptions options = CallOptions.DEFAULT;
        if (!plan.compression.isEmpty()) {
            options = options.withCompression(plan.compression);
        }
        if (plan.deadline_ms > 0) {
            options = options.withDeadlineAfter(plan.deadline_ms, TimeUnit.MILLISECONDS);
        }
        ClientCall<Message, Message> call = channel.newCall(method, options);
        Result result = new Result();
        CompletableFuture<Status> ended = new CompletableFuture<>();
        call.start(new ClientCall.Listener<>() {
            @Override
            public void onMessage(Message message) {
                result.answers.add(read(message));
                if (plan.cancel.equals("first")) {
                    call.cancel("after the first answer", null);
                }
            }

            @Override
            public void onClose(Status status, Metadata trailers) {
                ended.complete(status);
            }
        }, metadata());
        call.request(Integer.MAX_VALUE);
        requests.forEach(call::sendMessage);
        if (!isStream || plan.cancel.equals("never")) {
            call.halfClose();
        }
        if (plan.cancel.equals("line")) {
            System.in.read();
            call.cancel("told to", null);
        }
        Status status = ended.get();
        result.code = status.getCode().name();
        result.message = status.getDescription() == null ? "" : status.getDescription();
        return result;
    }

    /** Calls without pause until the standard input ends. */
    private Result repeat() throws Exception {
        CompletableFuture<Void> over = new CompletableFuture<>();
        new Thread(() -> {
            try {
                System.in.readAllBytes();
            } catch (java.io.IOException error) {
                // It has ended, too.
            }
            over.complete(null);
        }).start();
        Result whole = new Result();
        List<Thread> callers = new ArrayList<>();
        for (int i = 0; i < REPEATERS; i++) {
            Thread caller = new Thread(() -> repeat(whole, over));
            caller.start();
            callers.add(caller);
        }
        for (Thread caller : callers) {
            caller.join();
        }
        return whole;
    }

    private void repeat(Result whole, CompletableFuture<Void> over) {
        while (!over.isDone()) {
            try {
                Result one = call("infer");
                synchronized (whole) {
                    whole.codes.merge(one.code, 1, Integer::sum);
                    if (!one.code.equals("OK") && whole.messages.size() < MAX_MESSAGES) {
                        whole.messages.add(one.message);
                    }
                }
                if (!one.code.equals("OK")) {
                    // While no server listens each call fails at once.
                    Thread.sleep(1);
                }
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        }
    }
}
