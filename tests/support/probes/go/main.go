// A gRPC client that tests run against the server. It reads a plan (JSON) from its argument, and prints what it saw as
// JSON. The plans are those of tests/support/probe.py; the probes in other languages read the same ones.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

const (
	unaryPath   = "/inference.GRPCInferenceService/ModelInfer"
	streamPath  = "/inference.GRPCInferenceService/ModelStreamInfer"
	maxMessage  = 1 << 30
	repeaters   = 4
	maxMessages = 5
)

var codeNames = []string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE",
	"DATA_LOSS", "UNAUTHENTICATED",
}

// Plan is what a test asks for.
type Plan struct {
	Target      string
	Descriptors string
	Root        string
	Certificate string
	Key         string
	KeepaliveMs int `json:"keepalive_ms"`
	// infer, stream or repeat.
	Action     string
	Model      string
	Elements   int
	Requests   int
	Parameters map[string]int64
	// Values of metadata whose names end with -bin are base64 of bytes.
	Metadata       map[string]string
	BinaryMetadata map[string][]byte `json:"binary_metadata"`
	Compression    string
	DeadlineMs     int `json:"deadline_ms"`
	// never, line (when a line comes on standard input) or first (after the first answer).
	Cancel string
}

// Answer is one message of the server.
type Answer struct {
	ID         string         `json:"id"`
	Error      string         `json:"error"`
	Equal      bool           `json:"equal"`
	Parameters map[string]any `json:"parameters"`
}

// Result is what the program prints.
type Result struct {
	Code     string         `json:"code"`
	Message  string         `json:"message"`
	Answers  []Answer       `json:"answers"`
	Codes    map[string]int `json:"codes"`
	Messages []string       `json:"messages"`
}

// Probe is a connected client.
type Probe struct {
	plan     Plan
	conn     *grpc.ClientConn
	request  protoreflect.MessageDescriptor
	response protoreflect.MessageDescriptor
	streamed protoreflect.MessageDescriptor
	content  []byte
}

func main() {
	var plan Plan
	if err := json.Unmarshal([]byte(os.Args[1]), &plan); err != nil {
		fail(err)
	}
	probe, err := connect(plan)
	if err != nil {
		fail(err)
	}
	defer probe.conn.Close()
	var result Result
	switch plan.Action {
	case "infer":
		result = probe.infer()
	case "stream":
		result = probe.stream()
	case "repeat":
		result = probe.repeat()
	default:
		fail(fmt.Errorf("unknown action %q", plan.Action))
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func connect(plan Plan) (*Probe, error) {
	descriptors, err := os.ReadFile(plan.Descriptors)
	if err != nil {
		return nil, err
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(descriptors, &set); err != nil {
		return nil, err
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		return nil, err
	}
	secured, err := transportCredentials(plan)
	if err != nil {
		return nil, err
	}
	quick := backoff.DefaultConfig
	quick.BaseDelay = 100 * time.Millisecond
	quick.MaxDelay = 200 * time.Millisecond
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(secured),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: quick, MinConnectTimeout: 5 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
	}
	if plan.KeepaliveMs > 0 {
		options = append(options, grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: time.Duration(plan.KeepaliveMs) * time.Millisecond, Timeout: time.Second, PermitWithoutStream: true,
		}))
	}
	conn, err := grpc.NewClient(plan.Target, options...)
	if err != nil {
		return nil, err
	}
	content := make([]byte, 4*plan.Elements)
	for i := range plan.Elements {
		binary.LittleEndian.PutUint32(content[4*i:], math.Float32bits(float32(i%251)))
	}
	return &Probe{
		plan:     plan,
		conn:     conn,
		request:  message(files, "inference.ModelInferRequest"),
		response: message(files, "inference.ModelInferResponse"),
		streamed: message(files, "inference.ModelStreamInferResponse"),
		content:  content,
	}, nil
}

func transportCredentials(plan Plan) (credentials.TransportCredentials, error) {
	if plan.Root == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(plan.Root)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	config := &tls.Config{RootCAs: roots}
	if plan.Certificate != "" {
		certificate, err := tls.LoadX509KeyPair(plan.Certificate, plan.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return credentials.NewTLS(config), nil
}

func message(files *protoregistry.Files, name protoreflect.FullName) protoreflect.MessageDescriptor {
	found, err := files.FindDescriptorByName(name)
	if err != nil {
		fail(err)
	}
	return found.(protoreflect.MessageDescriptor)
}

func (p *Probe) options() []grpc.CallOption {
	if p.plan.Compression == "gzip" {
		return []grpc.CallOption{grpc.UseCompressor(gzip.Name)}
	}
	return nil
}

func (p *Probe) context() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	if p.plan.DeadlineMs > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(p.plan.DeadlineMs)*time.Millisecond)
	}
	for name, value := range p.plan.Metadata {
		ctx = metadata.AppendToOutgoingContext(ctx, name, value)
	}
	for name, value := range p.plan.BinaryMetadata {
		ctx = metadata.AppendToOutgoingContext(ctx, name, string(value))
	}
	if p.plan.Cancel == "line" {
		go func() {
			_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
			cancel()
		}()
	}
	return ctx, cancel
}

func field(m protoreflect.Message, name protoreflect.Name) protoreflect.FieldDescriptor {
	return m.Descriptor().Fields().ByName(name)
}

func (p *Probe) newRequest(id string) *dynamicpb.Message {
	made := dynamicpb.NewMessage(p.request)
	made.Set(field(made, "model_name"), protoreflect.ValueOfString(p.plan.Model))
	made.Set(field(made, "id"), protoreflect.ValueOfString(id))
	made.Mutable(field(made, "raw_input_contents")).List().Append(protoreflect.ValueOfBytes(p.content))
	input := made.Mutable(field(made, "inputs")).List().AppendMutable().Message()
	input.Set(field(input, "name"), protoreflect.ValueOfString("IN"))
	input.Set(field(input, "datatype"), protoreflect.ValueOfString("FP32"))
	shape := input.Mutable(field(input, "shape")).List()
	shape.Append(protoreflect.ValueOfInt64(1))
	shape.Append(protoreflect.ValueOfInt64(int64(p.plan.Elements)))
	parameters := made.Mutable(field(made, "parameters")).Map()
	for name, value := range p.plan.Parameters {
		parameter := parameters.NewValue()
		parameter.Message().Set(field(parameter.Message(), "int64_param"), protoreflect.ValueOfInt64(value))
		parameters.Set(protoreflect.ValueOfString(name).MapKey(), parameter)
	}
	return made
}

func (p *Probe) read(response protoreflect.Message) Answer {
	outputs := response.Get(field(response, "raw_output_contents")).List()
	answer := Answer{
		ID:         response.Get(field(response, "id")).String(),
		Equal:      outputs.Len() == 1 && bytes.Equal(outputs.Get(0).Bytes(), p.content),
		Parameters: map[string]any{},
	}
	response.Get(field(response, "parameters")).Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
		value.Message().Range(func(_ protoreflect.FieldDescriptor, choice protoreflect.Value) bool {
			answer.Parameters[key.String()] = choice.Interface()
			return true
		})
		return true
	})
	return answer
}

func outcome(result Result, err error) Result {
	if err == io.EOF {
		err = nil
	}
	result.Code, result.Message = nameOf(status.Code(err)), ""
	if err != nil {
		result.Message = status.Convert(err).Message()
	}
	return result
}

func nameOf(code codes.Code) string { return codeNames[code] }

func (p *Probe) infer() Result {
	ctx, cancel := p.context()
	defer cancel()
	response := dynamicpb.NewMessage(p.response)
	err := p.conn.Invoke(ctx, unaryPath, p.newRequest("0"), response, p.options()...)
	if err != nil {
		return outcome(Result{}, err)
	}
	return outcome(Result{Answers: []Answer{p.read(response)}}, nil)
}

func (p *Probe) stream() Result {
	ctx, cancel := p.context()
	defer cancel()
	description := &grpc.StreamDesc{StreamName: "ModelStreamInfer", ServerStreams: true, ClientStreams: true}
	stream, err := p.conn.NewStream(ctx, description, streamPath, p.options()...)
	if err != nil {
		return outcome(Result{}, err)
	}
	for i := range p.plan.Requests {
		// A failure to send is told by the receiving side.
		if stream.SendMsg(p.newRequest(fmt.Sprint(i))) != nil {
			break
		}
	}
	if p.plan.Cancel == "never" {
		if err := stream.CloseSend(); err != nil {
			return outcome(Result{}, err)
		}
	}
	var result Result
	for {
		received := dynamicpb.NewMessage(p.streamed)
		if err := stream.RecvMsg(received); err != nil {
			return outcome(result, err)
		}
		answer := p.read(received.Get(field(received, "infer_response")).Message())
		answer.Error = received.Get(field(received, "error_message")).String()
		result.Answers = append(result.Answers, answer)
		if p.plan.Cancel == "first" {
			cancel()
		}
	}
}

// repeat calls without pause until its standard input ends.
func (p *Probe) repeat() Result {
	over := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(over)
	}()
	result := Result{Codes: map[string]int{}}
	var lock sync.Mutex
	var group sync.WaitGroup
	for range repeaters {
		group.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				p.call(&result, &lock)
			}
		})
	}
	group.Wait()
	return result
}

func (p *Probe) call(result *Result, lock *sync.Mutex) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err := p.conn.Invoke(ctx, unaryPath, p.newRequest("0"), dynamicpb.NewMessage(p.response), p.options()...)
	lock.Lock()
	result.Codes[nameOf(status.Code(err))]++
	if err != nil && len(result.Messages) < maxMessages {
		result.Messages = append(result.Messages, status.Convert(err).Message())
	}
	lock.Unlock()
	if err != nil {
		// While no server listens each call fails at once.
		time.Sleep(time.Millisecond)
	}
}
