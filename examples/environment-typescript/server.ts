// An environment in TypeScript: a shop, in which the model buys what the prompt asks for with the tool `buy`.
//
//     cp ../../protos/relaxd/v1/environment.proto . && npm install && npm run build && npm start
//     relaxd env test grpc://localhost:50070 --prompt "Buy two pears."
//
// Then, in the run's configuration:  [agent] environment = "grpc://localhost:50070"
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

type Unary<Request, Response> = grpc.handleUnaryCall<Request, Response>;
interface OpenRequest { session_id: string; answer: string; lease_seconds: number }
interface OpenResponse { messages_json?: string; tools_json?: string }
interface ToolCall { id: string; name: string; arguments_json: string }
interface StepRequest { session_id: string; turn: number; text: string; tool_calls: ToolCall[] }
interface StepResponse { messages_json?: string; reward?: number; done?: boolean; info?: Record<string, number> }
interface Session { wanted: string; bought: string[]; turn: number; last: StepResponse; timer: NodeJS.Timeout }

const item = { type: "string", description: "such as pear" };
const parameters = { type: "object", properties: { item }, required: ["item"] };
const tools = [{ type: "function", function: { name: "buy", description: "Buys one item.", parameters } }];
const sessions = new Map<string, Session>();

// The reference answer lists what is wanted, such as "pear,pear". A session that nobody asks for is forgotten.
const openSession: Unary<OpenRequest, OpenResponse> = (call, reply) => {
  const { session_id, answer, lease_seconds } = call.request;
  if (!sessions.has(session_id)) {
    const timer = setTimeout(() => sessions.delete(session_id), lease_seconds * 1000);
    sessions.set(session_id, { wanted: answer, bought: [], turn: 0, last: {}, timer });
  }
  reply(null, { tools_json: JSON.stringify(tools) });
};

// The same turn may be asked for again: then the answer is the same, and nothing is bought twice.
const step: Unary<StepRequest, StepResponse> = (call, reply) => {
  const { session_id, turn, tool_calls } = call.request;
  const session = sessions.get(session_id);
  if (!session) return reply({ code: grpc.status.NOT_FOUND, details: `there is no session ${session_id}` });
  session.timer.refresh();
  if (turn !== session.turn) {
    session.turn = turn;
    session.last = tool_calls.length > 0 ? buy(session, tool_calls) : pay(session);
  }
  reply(null, session.last);
};

function buy(session: Session, calls: ToolCall[]): StepResponse {
  const messages = calls.map(({ id, name, arguments_json }) => {
    const { item } = JSON.parse(arguments_json || "{}");
    const known = name === "buy" && typeof item === "string";
    if (known) session.bought.push(item);
    const content = known ? `You have ${session.bought.join(", ")}.` : "error: call buy with an item";
    return { role: "tool", name, tool_call_id: id, content };
  });
  return { messages_json: JSON.stringify(messages) };
}

function pay({ wanted, bought }: Session): StepResponse {
  const right = [...bought].sort().join() === wanted.split(",").sort().join();
  return { reward: right ? 1 : 0, done: true, info: { bought: bought.length } };
}

const closeSession: Unary<{ session_id: string }, object> = (call, reply) => {
  clearTimeout(sessions.get(call.request.session_id)?.timer);
  sessions.delete(call.request.session_id);
  reply(null, {});
};

const definition = loadSync("environment.proto", { keepCase: true, defaults: true });
const relaxd = grpc.loadPackageDefinition(definition) as any;
const server = new grpc.Server();
const handlers = { OpenSession: openSession, Step: step, CloseSession: closeSession };
server.addService(relaxd.relaxd.v1.Environment.service, handlers);
server.bindAsync(process.argv[2] ?? "0.0.0.0:50070", grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`listening on port ${port}`);
});
