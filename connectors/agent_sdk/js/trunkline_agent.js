// trunkline-agent: agents of a Trunkline backbone in JavaScript. This file is the package's only entry.

export { Agent } from "./lib/agent.js";
export { canonical, canonicalBytes, decode, Float, MalformedJsonError } from "./lib/canonical_json.js";
export { Credentials, HubAccess, McpAccess, MqttAccess } from "./lib/credentials.js";
export { Delegator, SubmittedJob } from "./lib/delegator.js";
export * as errors from "./lib/errors.js";
export {
  BackboneUnreachable,
  EventRejected,
  LeaseLost,
  MessageRejected,
  NoReply,
  NotFound,
  OutboxBusy,
  RateLimited,
  ReceiptMissing,
  Refused,
  TrunklineError,
  UsageError,
} from "./lib/errors.js";
export { Job } from "./lib/job.js";
export { Message } from "./lib/message.js";
export {
  contentId,
  jobUser,
  mqttPassword,
  signedBytes,
  signedMessageBytes,
  signEvent,
  signEventText,
  signMessage,
  verifyEvent,
} from "./lib/signing.js";
