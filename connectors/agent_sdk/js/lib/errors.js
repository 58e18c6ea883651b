// The error tree of the library. Each error has a stable code (`reason`) and the next step (`advice`).

/** The base class of the library's errors. Raised itself: something outside the program failed for good. */
export class TrunklineError extends Error {
  /**
   * @param {string} message what happened, with which value; never a secret
   * @param {{reason?: string, advice?: string, cause?: unknown}} [more]
   */
  constructor(message, { reason, advice, cause } = {}) {
    super(message, cause === undefined ? undefined : { cause });
    const kind = this.constructor;
    this.name = kind.name;
    this.reason = reason ?? kind.reason;
    this.advice = advice ?? kind.advice;
    this.exitCode = kind.exitCode;
  }

  static reason = "failed";
  static advice = "look at the message; the gateway's log has more";
  static exitCode = 1;
}

/** A call with arguments that cannot work. Nothing was sent, or the gateway found the request invalid. */
export class UsageError extends TrunklineError {
  static reason = "usage";
  static advice = "correct the arguments; the same call fails again";
  static exitCode = 2;
}

/** The requested thing does not exist, or does no longer. */
export class NotFound extends TrunklineError {
  static reason = "not_found";
  static advice = "check the name or id";
  static exitCode = 3;
}

/** The request was refused by a verdict, by a policy or for lack of a right. */
export class Refused extends TrunklineError {
  static reason = "refused";
  static advice = "do not repeat the request unchanged";
  static exitCode = 4;
}

/** Trunkline rejected a sent event of a job. `receipt` has the reason. The event will not be sent again. */
export class EventRejected extends Refused {
  static advice = "do not send the event again: the verdict stays the same";

  constructor(receipt) {
    const reason = receipt.reason ?? "no_reason";
    super(`seq ${receipt.seq} was rejected: ${reason}`, { reason });
    this.receipt = receipt;
  }
}

/** Trunkline rejected a sent message. */
export class MessageRejected extends Refused {}

/** The caller sends more than its limits allow, and has waited for as long as its patience allows. */
export class RateLimited extends Refused {
  static reason = "rate_limited";
  static advice = "send again after `retryAfterS` seconds, or ask the operator for higher limits";

  constructor(message, { retryAfterS = null, ...more } = {}) {
    super(message, more);
    this.retryAfterS = retryAfterS;
  }
}

/** The lease of a message has ended: another consumer may have the message now. */
export class LeaseLost extends Refused {
  static reason = "lease_lost";
  static advice = "the message is handed out again: make the work repeatable, or use a longer `leaseS`";
}

/** The gateway or the broker did not answer in time. */
export class BackboneUnreachable extends TrunklineError {
  static reason = "unreachable";
  static advice = "'./trunkline doctor' shows what is down; check the address in the credentials";
  static exitCode = 5;
}

/** No answer came within the time limit: to a question, or to a watch of a job. */
export class NoReply extends BackboneUnreachable {
  static reason = "no_reply";
  static advice = "a later reply is in the mailbox, with the id of the question in `inReplyTo`";

  constructor(message, { messageId = null, ...more } = {}) {
    super(message, more);
    this.messageId = messageId;
  }
}

/** The broker has the event, but no receipt came in time. The event stays in the outbox. */
export class ReceiptMissing extends BackboneUnreachable {
  static reason = "receipt_missing";
  static advice = "call `resend()`, or publish the next event: the same bytes are sent again first";
}

/** Another process has locked the outbox and did not release it within the time limit. */
export class OutboxBusy extends TrunklineError {
  static reason = "outbox_busy";
  static advice = "wait for the other process, or end it; two processes must not number the same job's events";
}
