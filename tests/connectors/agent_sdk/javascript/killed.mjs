// The program of killed_agent.py in JavaScript: arguments are the credentials, the point, another agent's name.

import { Agent, Credentials } from "../../../../connectors/agent_sdk/js/trunkline_agent.js";

const [path, point, other] = process.argv.slice(2);
const agent = new Agent(null, Credentials.load(path));
const die = () => process.kill(process.pid, "SIGKILL");
const isLoop = point.startsWith("loop_");

async function work(message) {
  if (point === "before_send") die();
  await message.reply({ done: message.payload });
  await agent.send(other, "note", { about: message.payload });
  await agent.publish("killed-agents", "note", { of: message.payload, half: 0.5 });
  await agent.send(other, "note", { n: 1 }, { key: "mine" });
  if (point.endsWith("after_send")) die();
}

for await (const message of agent.messages({ leaseS: 2, waitS: 20 })) {
  console.log(message.attempt);
  if (isLoop) await work(message);
  else await message.handle(work);
  await message.ack();
  break;
}
await agent.close();
