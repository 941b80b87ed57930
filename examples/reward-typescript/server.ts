// A reward in TypeScript: 1 if the answer ends with the reference, with the share of its last line as a part.
//
//     cp ../../protos/relaxd/v1/remote_reward.proto . && npm install && npm run build && npm start
//
// Then, in the run's configuration:  [reward] address = "localhost:9000"
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

interface Answer {
  text: string;
}

interface Request {
  prompt: string;
  reference: string;
  metadata_json: string;
  answers: Answer[];
}

interface Score {
  reward?: number;
  parts?: Record<string, number>;
  error?: string;
}

function score(answer: Answer, reference: string): Score {
  if (reference === "") return { error: "the prompt has no reference answer" };
  const lines = answer.text.trimEnd().split("\n");
  const last = lines[lines.length - 1];
  return { reward: last.endsWith(reference) ? 1 : 0, parts: { last_line: last.length / Math.max(answer.text.length, 1) } };
}

function scoreAnswers(
  call: grpc.ServerUnaryCall<Request, { scores: Score[] }>,
  reply: grpc.sendUnaryData<{ scores: Score[] }>,
): void {
  const { answers, reference } = call.request;
  reply(null, { scores: answers.map((answer) => score(answer, reference)) });
}

const definition = loadSync("remote_reward.proto", { keepCase: true, defaults: true });
const relaxd = grpc.loadPackageDefinition(definition) as any;
const server = new grpc.Server();
server.addService(relaxd.relaxd.v1.RemoteReward.service, { ScoreAnswers: scoreAnswers });
server.bindAsync(process.argv[2] ?? "0.0.0.0:9000", grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`listening on port ${port}`);
});
